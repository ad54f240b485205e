"""Imports for the process that ranks are forked from: modules that most rank functions need."""

import os

from tests.ranks import die_with_parent, preload

die_with_parent(os.getppid())
preload()
