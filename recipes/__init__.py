"""Recipes: whole runs from text to an exported model, each with its configuration, page, figures and loss curve."""
