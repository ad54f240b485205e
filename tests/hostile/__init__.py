"""Files made to harm: each must be refused in one line, at a small cost."""
