"""CogVideoX and CogVideoX 1.5. Not registered yet: its stages are to come."""
