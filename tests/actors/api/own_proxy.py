"""Run Ray Serve with its own proxy on this machine, with an application that returns the lengths of bodies."""

import os
import sys
import tempfile

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Sizes:
    async def __call__(self, request: Request):
        return len(await request.body())


def main(port):
    del os.environ["RAY_AUTH_TOKEN_PATH"], os.environ["RAY_AUTH_MODE"]
    with tempfile.TemporaryDirectory(prefix="own-proxy-") as folder:
        ray.init(
            num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False, _node_ip_address="127.0.0.1"
        )
        try:
            serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
            print("listens", flush=True)
            sys.stdin.readline()
            serve.run(Sizes.bind(), name="sizes", route_prefix="/")
            print("serves", flush=True)
            sys.stdin.read()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
