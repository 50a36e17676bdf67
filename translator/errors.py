"""The one exception for mistakes a user can mend."""


class UserError(ValueError):
    """Bad input: the message is one line that names the file, line or option and says what would be right.

    The command line prints it on stderr and exits with status 2, without a traceback.
    """
