"""The command line around lp: its apps, its tools and shared code. In the wheel it is the package lp.launch."""

PACKAGE = __name__  # the name by which other processes find the apps
