"""The stages as functions over a runtime, split into pieces that an executor calls one by one.

A stage has two kinds of pieces. Those that prepare inputs (`image_inputs`, `expert_inputs`, `device_state`,
`decoder_inputs`) only copy to the devices: they contain no collective and may run on another thread while a step runs.
Those that compute (`encode_prompt`, `encode_image`, `ExpertRun`, `decode_chunks`) must be called by every process of a
mesh, in the same order. `LocalExecutor` puts the pieces together for one machine.

The loops run on the host, with one device call a step: between steps progress is reported, results are checked, and a
callback may stop the run by raising.
"""

# ruff: noqa: F401  (Other packages import these names from here.)

from wan_tpu.stages.chunks import growing_program
from wan_tpu.stages.decode import decode, decode_chunks, decoder_inputs
from wan_tpu.stages.decoder_noise import Noise, draw_ahead, draw_noise
from wan_tpu.stages.denoise import (
    ExpertRun,
    StepEvent,
    device_state,
    expert_inputs,
    fetch_adapters,
    finish_state,
    initial_state,
    to_host,
)
from wan_tpu.stages.encode import (
    ImageInputs,
    Warn,
    encode_image,
    encode_prompt,
    image_inputs,
    image_program,
    reference_program,
    text_program,
    vae_encode,
)
from wan_tpu.stages.enlarging import enlarging_program
from wan_tpu.stages.local import Around, LocalExecutor
from wan_tpu.stages.sound import decode_sound, sound_decoders, sound_program
from wan_tpu.stages.step_programs import (
    ExpertInputs,
    keys_program,
    residual_shape,
    step_conditioning,
    step_numbers,
    step_program,
)
from wan_tpu.stages.vae import vae_programs
