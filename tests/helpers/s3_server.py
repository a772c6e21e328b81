"""An S3 server on loopback: moto's, which speaks the protocol over HTTP and keeps objects in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
_REASON = "needs an S3 server and client: pip install s3fs 'moto[server]'"


@contextmanager
def s3_server() -> Iterator[tuple[str, dict[str, str]]]:
    """Serve an empty bucket; yield its name, and the environment by which this and other processes reach it.

    Skips the test where a package of S3 is missing.
    """
    pytest.importorskip("s3fs", reason=_REASON)
    pytest.importorskip("flask", reason=_REASON)
    boto3 = pytest.importorskip("boto3", reason=_REASON)
    server = pytest.importorskip("moto.server", reason=_REASON).ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    # Servers of one process share their objects.
    bucket = f"bucket-{uuid.uuid4().hex}"
    try:
        host, port = server.get_host_and_port()
        environment = KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=bucket)
        client.close()
        yield bucket, environment
    finally:
        server.stop()
