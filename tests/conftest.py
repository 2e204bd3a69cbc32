"""What holds for all tests."""

import signal

# A shell starts its background jobs with Ctrl-C ignored, and they and their children stay deaf to it; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
