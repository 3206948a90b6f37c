"""The stages of a request, in the order in which it runs through them: importing `wan_tpu` takes seconds."""

STAGES = ("encoder", "denoise_high", "denoise_low", "decoder")
