"""The sources of a model's files. Their errors are classified by whose fault they are."""
