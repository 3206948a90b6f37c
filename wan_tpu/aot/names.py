"""The names of the programs that a video needs, for code that only reads their prices."""

STEP, SKIPPED = "denoise step", "denoise step, skipped"
# Names of steps on smaller latents, if these are enlarged between experts, once or twice.
FIRST_STEP, SMALLEST_STEP = "denoise step, smaller", "denoise step, smallest"
ENLARGE, FIRST_ENLARGE = "enlarge latents", "enlarge latents, smaller"
ADAPTERS = "apply adapters"
KEYS = "text keys"
# Those of experts without guidance have names of their own where other experts have guidance.
UNGUIDED = ", unguided"
UNGUIDED_STEP, UNGUIDED_SKIPPED, UNGUIDED_KEYS = (name + UNGUIDED for name in (STEP, SKIPPED, KEYS))
DENOISE_PROGRAMS = SMALLEST_STEP, FIRST_ENLARGE, FIRST_STEP, ENLARGE, STEP, SKIPPED, UNGUIDED_STEP, UNGUIDED_SKIPPED
