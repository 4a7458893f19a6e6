"""What a kernel may take, and how many cases a check draws, unless an option says otherwise. Imports nothing."""

# Seconds of a call of an untrusted candidate, or of its import.
CALL_SECONDS = 300.0
# Seconds of a processor that Triton's compiler may take for a kernel.
COMPILE_SECONDS = 5.0
# Generated cases of a check.
EXAMPLES = 25
