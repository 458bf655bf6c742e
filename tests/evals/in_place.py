"""What tests have processes do in place of their work; without what quantrot imports they are there at once."""

import os
import signal


def ends(*how):
    """As the kernel ends one that takes too much memory."""
    os._exit(9)


def tells_whether_ctrl_c_is_blocked(*how):
    os._exit(7 if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 8)
