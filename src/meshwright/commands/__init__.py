"""The commands of the program ``meshwright``, a file for each.

Whatever is heavy is imported inside the command that needs it, so that ``--help`` is instant.
"""
