"""Files that commit 25d5a27 wrote, and records of its results."""
