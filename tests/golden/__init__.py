"""Files that commit 25d5a27 wrote, and what it did with them."""
