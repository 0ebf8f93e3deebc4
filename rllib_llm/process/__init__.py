"""What is in force in one process: its attestation and its memory."""
