"""The sources of a model's files, whose errors are classified by whose fault they are."""
