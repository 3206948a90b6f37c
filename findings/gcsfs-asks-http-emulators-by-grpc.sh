#!/usr/bin/env bash
# With an emulator of Google Cloud Storage, every call of gcsfs to a bucket waits for up to a minute.
#
# Guess: with STORAGE_EMULATOR_HOST set to an http:// address, gcsfs sends all requests there by HTTP, and reading an
# object of ten bytes takes milliseconds, as it does with google-cloud-storage.
# Seen (gcsfs 2026.10.1, google-cloud-storage 3.17.1): before it reads or writes, gcsfs asks what kind the bucket is, by
# gRPC and TLS at the emulator's port. The handshakes fail, and are repeated for a minute; then it logs a warning and
# goes on by HTTP. The answer isn't kept, so the next call waits again: 88 s for a write, and 44 s for a read after it.
# With GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false nothing is asked.
#
# Whoever tests with an emulator sees tests that hang.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gcsfs==2026.10.1 fsspec==2026.9.0 google-cloud-storage==3.17.1 gcp-storage-emulator
cd "$folder"
cat > read.py <<'END'
import os
import threading

from gcp_storage_emulator.server import create_server

server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="videos")
server.start()
os.environ["STORAGE_EMULATOR_HOST"] = "http://127.0.0.1:%d" % server._api._httpd.server_port

import gcsfs
from google.cloud import storage

blob = storage.Client.create_anonymous_client().bucket("videos").blob("a")
blob.upload_from_string(b"0123456789")
read = {"google-cloud-storage": blob.download_as_bytes, "gcsfs": lambda: gcsfs.GCSFileSystem(token="anon").cat_file("videos/a")}
for name, call in read.items():
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(12)
    print(name, "takes more than 12 s" if thread.is_alive() else "has read it", flush=True)
os._exit(0)
END
for support in true false; do
  echo "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=$support"
  GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=$support "$folder/venv/bin/python" read.py 2> errors
done | tee seen
diff seen - <<'END'
GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=true
google-cloud-storage has read it
gcsfs takes more than 12 s
GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false
google-cloud-storage has read it
gcsfs has read it
END
