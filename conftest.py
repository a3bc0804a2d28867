"""For the unit and the system tests alike."""
import signal

from hypothesis import HealthCheck, settings

# a loaded machine is no failure
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# and neither is a shell that started the tests in the background, which has its children ignore Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
