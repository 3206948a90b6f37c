"""HTTP: routes, bodies and answers, and how a request becomes a job."""
