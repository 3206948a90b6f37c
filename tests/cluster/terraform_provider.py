"""A provider for Terraform that knows the Google provider's arguments and types, and creates nothing.

With it `terraform validate` and `terraform plan` run without a network. It speaks version 5 of Terraform's protocol for
plugins (https://developer.hashicorp.com/terraform/plugin/terraform-plugin-protocol): gRPC with a few messages, whose
fields are listed here as far as they are used. Values are msgpack.
"""

import contextlib
import json
import os
from concurrent import futures

import grpc
import msgpack
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TYPES = {"bool": 8, "bytes": 12, "int": 3, "string": 9}
# Fields of the messages: name, number, type. A star is for several, "{}" for a map by names.
_MESSAGES = {
    "Value": [("msgpack", 1, "bytes")],
    "Block": [("attributes", 2, "*Attribute"), ("block_types", 3, "*NestedBlock")],
    "Attribute": [
        ("name", 1, "string"),
        ("type", 2, "bytes"),
        ("required", 4, "bool"),
        ("optional", 5, "bool"),
        ("computed", 6, "bool"),
    ],
    "NestedBlock": [
        ("type_name", 1, "string"),
        ("block", 2, "Block"),
        ("nesting", 3, "int"),
        ("min_items", 4, "int"),
        ("max_items", 5, "int"),
    ],
    "Schema": [("version", 1, "int"), ("block", 2, "Block")],
    "SchemaEntry": [("key", 1, "string"), ("value", 2, "Schema")],
    "Schemas": [("provider", 1, "Schema"), ("resource_schemas", 2, "*SchemaEntry")],
    "Configuration": [("config", 1, "Value")],
    "Change": [("type_name", 1, "string"), ("proposed_new_state", 3, "Value")],
    "Planned": [("planned_state", 1, "Value"), ("legacy_type_system", 5, "bool")],
    "Nothing": [],
}
_LIST = 2  # Blocks that may be repeated are a list in the provider's types.
_UNKNOWN = msgpack.ExtType(0, b"\0")  # A value that only creating the resource would tell.


def _build_messages():
    file = descriptor_pb2.FileDescriptorProto(name="terraform.proto", package="terraform", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            label = 3 if kind.startswith("*") else 1
            kind = kind.removeprefix("*")
            type_name = {} if kind in _TYPES else {"type_name": f".terraform.{kind}"}
            message.field.add(name=field, number=number, label=label, type=_TYPES.get(kind, 11), **type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"terraform.{name}")) for name in _MESSAGES
    }


class Provider:
    """Answers Terraform's questions about resources of given kinds."""

    def __init__(self, resources):
        self.messages = _build_messages()
        self._computed = {
            kind: {*known.get("optional", ()), *known.get("attributes", ())} - {*known.get("blocks", ())}
            for kind, known in resources.items()
        }
        schema = self.messages["Schema"]
        settings = {"optional": {"project": "string", "region": "string"}}
        self._schemas = self.messages["Schemas"](
            provider=schema(block=self._describe(settings)),
            resource_schemas=[
                self.messages["SchemaEntry"](key=kind, value=schema(block=self._describe(known, top=True)))
                for kind, known in resources.items()
            ],
        )

    def _describe(self, known, *, top=False):
        block = self.messages["Block"]()
        for name, kind in known.get("required", {}).items():
            block.attributes.add(name=name, type=_encode_type(kind), required=True)
        for name, kind in known.get("optional", {}).items():
            block.attributes.add(name=name, type=_encode_type(kind), optional=True, computed=top)
        arguments = {*known.get("required", ()), *known.get("optional", ()), *known.get("blocks", ())}
        for name in known.get("attributes", ()):
            if name not in arguments:
                block.attributes.add(name=name, type=b'"dynamic"', computed=True)
        for name, inner in known.get("blocks", {}).items():
            block.block_types.add(
                type_name=name,
                block=self._describe(inner),
                nesting=_LIST,
                min_items=1 if inner.get("is_required") else 0,
                max_items=0 if inner.get("repeats") else 1,
            )
        return block

    def _plan(self, change):
        """Return what a resource will be: as configured, and the rest unknown."""
        state = msgpack.unpackb(change.proposed_new_state.msgpack, strict_map_key=False)
        for name in self._computed[change.type_name]:
            if state.get(name) is None:
                state[name] = _UNKNOWN
        value = self.messages["Value"](msgpack=msgpack.packb(state))
        return self.messages["Planned"](planned_state=value, legacy_type_system=True)

    def build_handler(self):
        """Return the gRPC service."""
        nothing = self.messages["Nothing"]
        methods = {
            "GetSchema": (nothing, lambda _: self._schemas),
            "PrepareProviderConfig": (self.messages["Configuration"], lambda request: request),
            "ValidateResourceTypeConfig": (nothing, lambda _: nothing()),
            "Configure": (nothing, lambda _: nothing()),
            "Stop": (nothing, lambda _: nothing()),
            "PlanResourceChange": (self.messages["Change"], self._plan),
        }
        return grpc.method_handlers_generic_handler(
            "tfplugin5.Provider",
            {
                name: grpc.unary_unary_rpc_method_handler(
                    lambda request, _, answer=answer: answer(request),
                    request_deserializer=message.FromString,
                    response_serializer=lambda reply: reply.SerializeToString(),
                )
                for name, (message, answer) in methods.items()
            },
        )


def _encode_type(kind):
    return json.dumps([kind, "string"] if kind in ("list", "map") else kind).encode()


@contextlib.contextmanager
def serve_provider(resources, socket):
    """Yield the environment variables with which Terraform uses this provider in place of hashicorp/google."""
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Provider(resources).build_handler()])
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    attached = {
        "Protocol": "grpc",
        "ProtocolVersion": 5,
        "Pid": os.getpid(),
        "Test": True,  # Else Terraform would end this process.
        "Addr": {"Network": "unix", "String": str(socket)},
    }
    try:
        yield {
            "TF_REATTACH_PROVIDERS": json.dumps({"registry.terraform.io/hashicorp/google": attached}),
            "CHECKPOINT_DISABLE": "1",
        }
    finally:
        server.stop(None)
