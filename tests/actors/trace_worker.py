"""Run by test_doctor_trace.py: traces a product and a sine on this machine's devices."""

import jax
import jax.numpy as jnp

from actors.doctor.trace import trace_categories

program = jax.jit(lambda x: jnp.sin(x @ x).sum())
matrix = jnp.ones((600, 600))
jax.block_until_ready(program(matrix))
seconds = trace_categories(lambda: program(matrix))
assert seconds and all(0 < second < 60 for second in seconds.values()), seconds
