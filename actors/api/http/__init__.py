"""HTTP: routes, bodies, answers, and how a request becomes a job."""
