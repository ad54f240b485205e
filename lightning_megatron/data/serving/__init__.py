"""How do samples reach the ranks: place in the run, loaders, broadcast?"""
