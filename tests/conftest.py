"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# A shell starts its background jobs with Ctrl-C ignored, and they and their children stay deaf to it; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take as long as a busy machine needs.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
