"""The commands: each reads its arguments, calls the pipeline and reports."""
