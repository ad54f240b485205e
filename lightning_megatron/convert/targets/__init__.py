"""How is a stored model written in another format? One writer a format, each from the same view of the source."""
