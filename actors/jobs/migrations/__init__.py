"""How the schema came to be, one step a file; `actors.jobs.migrate` runs them."""
