#!/usr/bin/env bash
# Run:ai's streamer says in no request to Google Cloud Storage who pays for it.
#
# Guess: GOOGLE_CLOUD_CPP_USER_PROJECT (or GOOGLE_CLOUD_QUOTA_PROJECT) names the project that pays, as Google's C++
# library documents it, and libstreamergcs.so is built with that library and has both names in it. So weights can be
# streamed from a bucket whose requester pays.
# Seen (runai-model-streamer 0.17.1): neither variable changes the request. It has no parameter `userProject` and no
# header `x-goog-user-project`, so such a bucket refuses it, and the streamer says only "File access error".
#
# google-cloud-storage of Python sends `userProject` if the bucket was made with it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'runai-model-streamer[gcs]==0.17.1' numpy torch
cd "$folder"
cat > read.py <<'END'
import http.server
import os
import threading

seen = []


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        seen.append(f"{self.path} {self.headers.get('x-goog-user-project')}")
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{last + 1}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(bytes(last + 1 - first))

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["CLOUD_STORAGE_EMULATOR_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
os.environ["GOOGLE_CLOUD_CPP_USER_PROJECT"] = os.environ["GOOGLE_CLOUD_QUOTA_PROJECT"] = "mine"

from runai_model_streamer.file_streamer import FileChunks, FileStreamer

with FileStreamer() as streamer:
    streamer.stream_files([FileChunks(0, "gs://bucket/a.bin", [0], [1000])])
    for _ in streamer.get_chunks():
        pass
print(*seen, sep="\n")
END
"$folder/venv/bin/python" read.py 2> errors | tee seen || cat errors
diff seen - <<'END'
/storage/v1/b/bucket/o/a.bin?alt=media None
END
