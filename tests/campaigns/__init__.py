"""Campaigns: the same kind of fault again and again at random moments, for as long as one likes.

``nox -s campaign -- --minutes 30`` runs all of them in turn, ``python -m tests.campaigns --minutes 5 killed`` some. A
module of this folder is a campaign if it has ``ATTEMPTS``: by a name, which is a row of the table, a function that
makes one attempt. They are no tests of pytest: what they find by chance becomes a test there.
"""
