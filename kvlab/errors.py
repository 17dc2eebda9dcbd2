"""The one error that a user's input can cause."""


class BadInput(ValueError):
    """One line naming the file or argument, what is wrong with it and what would be right.

    The CLI prints the line on stderr and exits with code 2.
    """
