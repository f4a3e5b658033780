"""The apps around lp, and what they share; in the wheel they are lp.launch."""

PACKAGE = __name__  # the name by which other processes find the apps
