"""The steps of diffusers' pipelines, with which those of ours are compared."""


def keep_latents(latents):
    """Return a callback for `callback_on_step_end` that appends the latents after each step to a list."""

    def keep(_pipeline, _step, _time, values):
        latents.append(values["latents"].numpy().copy())
        return values

    return keep
