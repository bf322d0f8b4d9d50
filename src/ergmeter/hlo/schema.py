"""The fields of a module that protobuf is asked for, as rows and as columns.

The classes are built at run time under a package name of ours: there is no generated code that
pins a protobuf version, and no clash with the copy of hlo.proto that tensorflow or torch-neuronx
loads.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from ergmeter.hlo.module import (
    CALLED_IDS,
    COMPUTATION_ID,
    COMPUTATION_INSTRUCTION,
    COMPUTATION_NAME,
    COMPUTATION_ROOT_ID,
    DOT_DIMENSIONS,
    ID,
    LITERAL,
    MODULE_COMPUTATION,
    NAME,
    OPCODE,
    OPERAND_IDS,
    PARAMETER_NUMBER,
    SHAPE,
)

# Field by field: name, number, kind (bytes, int64 or a message of this schema), and how often.
Schema: TypeAlias = dict[str, tuple[tuple[str, int, str, str], ...]]

_REPEATED, _OPTIONAL = "repeated", "optional"
_SKIPPED = (
    # Nobody asks for these, but all or many instructions have them, and what is in no schema
    # takes protobuf longer.
    ("name", NAME, "bytes", _OPTIONAL),
    ("metadata", 7, "bytes", _OPTIONAL),
    ("parameter_number", PARAMETER_NUMBER, "int64", _OPTIONAL),
    ("dimensions", 14, "bytes", _OPTIONAL),
    ("slice_dimensions", 17, "bytes", _OPTIONAL),
    ("precision_config", 51, "bytes", _OPTIONAL),
    ("frontend_attributes", 68, "bytes", _OPTIONAL),
    ("statistics", 82, "bytes", _OPTIONAL),
)
ROWS: Schema = {
    "Line": (
        ("opcode", OPCODE, "bytes", _OPTIONAL),
        ("id", ID, "int64", _OPTIONAL),
        ("shape", SHAPE, "bytes", _OPTIONAL),
        ("literal", LITERAL, "bytes", _OPTIONAL),
        ("dot_dimension_numbers", DOT_DIMENSIONS, "bytes", _OPTIONAL),
        ("operand_ids", OPERAND_IDS, "int64", _REPEATED),
        ("called_computation_ids", CALLED_IDS, "int64", _REPEATED),
        *_SKIPPED,
    ),
    "Computation": (
        ("name", COMPUTATION_NAME, "bytes", _OPTIONAL),
        ("id", COMPUTATION_ID, "int64", _OPTIONAL),
        ("root_id", COMPUTATION_ROOT_ID, "int64", _OPTIONAL),
        ("instructions", COMPUTATION_INSTRUCTION, "bytes", _REPEATED),
    ),
    "Module": (("computations", MODULE_COMPUTATION, "Computation", _REPEATED),),
}
COLUMNS: Schema = {
    "Lines": (  # all of a computation's: of most just the opcode and the id are asked for
        ("opcode", OPCODE, "bytes", _REPEATED),
        ("id", ID, "int64", _REPEATED),
        ("shape", SHAPE, "bytes", _OPTIONAL),
        ("literal", LITERAL, "bytes", _OPTIONAL),
        ("dot_dimension_numbers", DOT_DIMENSIONS, "bytes", _OPTIONAL),
        ("operand_ids", OPERAND_IDS, "int64", _REPEATED),  # so that damage is found
        ("called_computation_ids", CALLED_IDS, "int64", _REPEATED),
        *_SKIPPED,
    ),
    "Picked": (
        ("opcode", OPCODE, "bytes", _REPEATED),
        ("id", ID, "int64", _REPEATED),
        ("shape", SHAPE, "bytes", _REPEATED),
        ("literal", LITERAL, "bytes", _REPEATED),
        ("dot_dimension_numbers", DOT_DIMENSIONS, "bytes", _REPEATED),
        ("operand_ids", OPERAND_IDS, "int64", _REPEATED),
        ("called_computation_ids", CALLED_IDS, "int64", _REPEATED),
        *_SKIPPED,
    ),
    "Computation": (("instructions", COMPUTATION_INSTRUCTION, "Lines", _OPTIONAL),),
    "Module": (("computations", MODULE_COMPUTATION, "Computation", _REPEATED),),
}


def classes(schema: Schema) -> dict[str, Any]:
    """The message classes of a schema."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415

    field = descriptor_pb2.FieldDescriptorProto
    kinds = {"bytes": field.TYPE_BYTES, "int64": field.TYPE_INT64}
    labels = {_REPEATED: field.LABEL_REPEATED, _OPTIONAL: field.LABEL_OPTIONAL}
    file = descriptor_pb2.FileDescriptorProto(
        name="ergmeter/hlo.proto", package="ergmeter.hlo", syntax="proto2"
    )
    for message, fields in schema.items():
        made = file.message_type.add(name=message)
        for name, number, kind, often in fields:
            added = made.field.add(name=name, number=number, label=labels[often])
            added.type = kinds.get(kind, field.TYPE_MESSAGE)
            if kind not in kinds:
                added.type_name = f".ergmeter.hlo.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ergmeter.hlo.{name}"))
        for name in schema
    }
