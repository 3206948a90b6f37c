"""The request that the tests of a slice make in one process, and host_process.py on the hosts of a slice."""

from wan_tpu import GenerationRequest


def image_request(image):
    return GenerationRequest(
        prompt="A cat looks into the camera",
        negative_prompt="ugly",
        image=image,
        height=64,
        width=96,
        frames=9,
        steps=4,
        guidance_scale=3.5,
        guidance_scale_2=2.5,
        shift=5.0,
    )
