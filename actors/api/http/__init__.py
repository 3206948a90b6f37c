"""HTTP: routes, and what they answer."""
