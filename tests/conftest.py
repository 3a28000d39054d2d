"""What holds for every test."""

import signal

# A shell that starts pytest in the background has it ignore Ctrl-C, and whatever it starts too;
# tests that interrupt a program need it to be heard.
signal.signal(signal.SIGINT, signal.default_int_handler)
