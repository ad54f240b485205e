"""How are tokens stored: which files make an indexed dataset, and how do they become others?"""
