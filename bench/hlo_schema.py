"""XLA's whole HLO schema, built at run time, for the bench's plain way of reading a module.

A schema that leaves fields out spares upb the work of building what
stands in them. Here are all 63 messages that a module can hold, with the numbers and types that
tensorflow 2.21's hlo_pb2 has (2026-11-15), and the payloads that XLA added in 2026. Fields that no
bench reads have no name of their own. Enumerations are int32: on the wire, and to upb, they are the
same.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# MESSAGE: number, * if repeated, type (a letter of TYPES or a message), =name if it is read
SCHEMA = """
HloModuleProto: 1s 2s 3*HloComputationProto=computations 4ProgramShapeProto 5i 6i
  7HloScheduleProto 8HloInputOutputAliasProto 10*CrossProgramPrefetch 11t 12OpSharding
  13*HloModuleProtoProfileInfo 14*OpSharding 15DeviceAssignmentProto 16t 17StackFrameIndexProto
  18HloBufferDonorProto 19FrontendAttributes 20OriginalValueRecoveryTableProto 22*Payload
HloComputationProto: 1s 2*HloInstructionProto=instructions 4ProgramShapeProto 5i 6i 7t 8s
HloInstructionProto: 1s 2s=opcode 3ShapeProto=shape 7OpMetadata 8LiteralProto 9i 11s 13i 14*i
  15Window 16ConvolutionDimensionNumbers 17*HloInstructionProtoSliceDimensions 18j 19j 20*i
  21PaddingConfig 22y 23j 24f 25i 26i 27y 28s=custom_call_target 29ShapeProto
  30DotDimensionNumbers=dot_dimension_numbers 31j 32*i 33GatherDimensionNumbers 34*i 35i=id
  36*i=operand_ids 37*i 38*i 40OpSharding 43y=backend_config 45i 47t 48ScatterDimensionNumbers
  49*ReplicaGroup 50i 51PrecisionConfig 52*SourceTarget 54OpSharding 55OpSharding 56t
  57*ShapeProto 58i 59TriangularSolveOptions 60t 61ParameterReplication 62CholeskyOptions 63s 65t
  66i 67t 68FrontendAttributes 69t 70j 71t 72s 73t 74*OutputOperandAliasing 75j 76j 77j 79s 80j
  81i 82StatisticsViz 85t 87CollectiveDeviceListProto 88OriginalValueProto 89t
  90RaggedDotDimensionNumbers 91ResultAccuracy 92IotaReplicaGroupListProto
  93MeshAxesReplicaGroupListProto 94t 95i 96j 97j 99Payload
ShapeProto: 2j 3*i=dimensions 4*ShapeProto 5LayoutProto 6*t
LayoutProto: 1*i 6*TileProto 7i 8i 9*j 10ShapeProto 11j 12j 13*t 14*t 15i 16i 17*SplitConfigProto
TileProto: 1*i
SplitConfigProto: 1i 2*i
OpMetadata: 1s 2s 3s 4j 5*j 8i 9i 10OpMetadataProfileInfo 12s 15j 16s 17j 18j 19j
OpMetadataProfileInfo: 1*j 2d 3j 4j 5j
LiteralProto: 1ShapeProto 2*t 3y 4*j 5*i 6*u 7*v 8*f 9*d 10*LiteralProto 11y 12*f 13y 14*i 15y 16y
  17y 18*d 19y 20y 21y 22y 23y 24y 25y 26y 27y 28y 29y 30y 31y 32y 33y
Window: 1*WindowDimension
WindowDimension: 1i 2i 3i 4i 5i 6i 7t
ConvolutionDimensionNumbers: 3i 4i 6*i 7i 8i 9i 10i 11*i 12*i
HloInstructionProtoSliceDimensions: 1i 2i 3i
PaddingConfig: 1*PaddingConfigPaddingConfigDimension
PaddingConfigPaddingConfigDimension: 1i 2i 3i
DotDimensionNumbers: 1*i=lhs_contracting_dimensions 2*i 3*i 4*i
RaggedDotDimensionNumbers: 1DotDimensionNumbers 2*i 3*i
GatherDimensionNumbers: 1*i 2*i 3*i 4i 5*i 6*i
OpSharding: 1j 2ShapeProto 3*i 4*i 5*OpSharding 6t 7*OpMetadata 8*j 9*i 10*j 11t 12i 13j
  14NamedShardingProto
NamedShardingProto: 2MeshProto 3*NamedShardingProtoDimensionSharding 4*AxisRefProto 5*AxisRefProto
  6*OpMetadata 7*AxisRefProto
MeshProto: 1*MeshProtoMeshAxis 2*i
MeshProtoMeshAxis: 1s 2i
NamedShardingProtoDimensionSharding: 1*AxisRefProto 2t
AxisRefProto: 1i 2AxisRefProtoSubAxis
AxisRefProtoSubAxis: 1i 2i
ReplicaGroup: 1*i
ScatterDimensionNumbers: 1*i 2*i 3*i 4i 5*i 6*i
PrecisionConfig: 1*j 2j
SourceTarget: 1i 2i
TriangularSolveOptions: 1t 2t 3t 4j
CholeskyOptions: 1t
ParameterReplication: 1*t
OutputOperandAliasing: 1*i 2i 3*i
FrontendAttributes: 1*FrontendAttributesMapEntry
FrontendAttributesMapEntry: 1s 2s
StatisticsViz: 1i 2*Statistic
Statistic: 1s 2d
CollectiveDeviceListProto: 1*ReplicaGroup 2IotaReplicaGroupListProto
IotaReplicaGroupListProto: 1i 2i 3*i 4*j
MeshAxesReplicaGroupListProto: 1MeshProto 2*AxisRefProto
OriginalValueProto: 1*OriginalValueElementProto 2t
OriginalValueElementProto: 1*i 2OriginalArrayProto
OriginalArrayProto: 1s 2*i
ResultAccuracy: 1j 2ResultAccuracyTolerance
ResultAccuracyTolerance: 1d 2d 3i
ProgramShapeProto: 1*ShapeProto 2ShapeProto 3*s
HloScheduleProto: 1*HloScheduleProtoSequencesEntry
HloScheduleProtoSequencesEntry: 1i 2HloScheduleProtoInstructionSequence
HloScheduleProtoInstructionSequence: 1*i
HloInputOutputAliasProto: 1*HloInputOutputAliasProtoAliasEntryProto
HloInputOutputAliasProtoAliasEntryProto: 1*i 2i 3*i 4j
HloBufferDonorProto: 1*HloBufferDonorProtoBufferDonorEntryProto
HloBufferDonorProtoBufferDonorEntryProto: 1i 2*i
CrossProgramPrefetch: 1i 2*i 3i
HloModuleProtoProfileInfo: 1j 2d 3j 4j 5s 6j 7i 8i
DeviceAssignmentProto: 1j 2j 3*DeviceAssignmentProtoComputationDevice
DeviceAssignmentProtoComputationDevice: 1*i
StackFrameIndexProto: 1*s 2*s 3*StackFrameIndexProtoFileLocation 4*StackFrameIndexProtoStackFrame
StackFrameIndexProtoFileLocation: 1j 2j 3j 4j 5j 6j
StackFrameIndexProtoStackFrame: 1j 2j
OriginalValueRecoveryTableProto: 1*OriginalValueRecoveryTableProtoEntry
OriginalValueRecoveryTableProtoEntry: 1OriginalArrayProto 2OriginalArrayProto 3HloModuleProto
Payload: 1y 2i
"""

Field = descriptor_pb2.FieldDescriptorProto
TYPES = {
    "i": Field.TYPE_INT64,
    "j": Field.TYPE_INT32,
    "u": Field.TYPE_UINT32,
    "v": Field.TYPE_UINT64,
    "s": Field.TYPE_STRING,
    "y": Field.TYPE_BYTES,
    "t": Field.TYPE_BOOL,
    "f": Field.TYPE_FLOAT,
    "d": Field.TYPE_DOUBLE,
}
PACKAGE = "ergmeter.bench"


def module_class() -> Any:  # noqa: ANN401  made at run time
    """The class of a whole HloModuleProto."""
    file = descriptor_pb2.FileDescriptorProto(
        name="ergmeter_bench_hlo.proto", package=PACKAGE, syntax="proto3"
    )
    for line in SCHEMA.replace("\n  ", " ").split("\n"):
        if line:
            name, _, fields = line.partition(": ")
            message = file.message_type.add(name=name)
            for field in fields.split():
                _add(message, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{PACKAGE}.HloModuleProto")
    return message_factory.GetMessageClass(found)


def _add(message: descriptor_pb2.DescriptorProto, written: str) -> None:
    match = re.fullmatch(r"(\d+)(\*?)(\w+)(?:=(\w+))?", written)
    assert match, written
    number, repeated, kind, name = match.groups()
    field = message.field.add(name=name or f"f{number}", number=int(number))
    field.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
    if kind in TYPES:
        field.type = TYPES[kind]
    else:
        field.type = Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
