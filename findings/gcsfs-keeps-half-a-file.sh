#!/usr/bin/env bash
# A file that is written to Google Cloud Storage with gcsfs appears half written if the writer fails.
#
# Guess: where the block of `with fs.open(path, "wb")` ends with an exception, there is no object, or still the one that
# was there: an upload becomes visible only once it is complete, as with google-cloud-storage's own `Blob.open`.
# Seen (gcsfs 2026.10.1, fsspec 2026.9.0, google-cloud-storage 3.17.1): `__exit__` closes the file, which completes the
# upload. What had been written replaces the object, and is read as if it were whole. Google's own client discards it.
#
# Only `fs.start_transaction()` around the block keeps half a file from appearing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gcsfs==2026.10.1 fsspec==2026.9.0 google-cloud-storage==3.17.1 gcp-storage-emulator
cd "$folder"
# Without this, gcsfs asks the emulator by gRPC and TLS what kind its bucket is, for minutes.
cat > write.py <<'END'
import contextlib
import os

from gcp_storage_emulator.server import create_server

server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="videos")
server.start()
os.environ["STORAGE_EMULATOR_HOST"] = "http://127.0.0.1:%d" % server._api._httpd.server_port

import gcsfs
from google.cloud import storage

fs = gcsfs.GCSFileSystem(token="anon")
bucket = storage.Client.create_anonymous_client().bucket("videos")
writers = {
    "gcsfs": lambda name: fs.open(f"videos/{name}", "wb"),
    "google-cloud-storage": lambda name: bucket.blob(name).open("wb"),
}
for name, open_file in writers.items():
    bucket.blob(name).upload_from_string(b"the whole file of before")
    with contextlib.suppress(ZeroDivisionError), open_file(name) as file:
        file.write(b"half a f")
        1 / 0
    print(name, bucket.blob(name).download_as_bytes())
server.stop()
END
"$folder/venv/bin/python" write.py 2> errors | tee seen || cat errors
diff seen - <<'END'
gcsfs b'half a f'
google-cloud-storage b'the whole file of before'
END
