"""Triton's gRPC protocol. Needs the extra `grpc`."""
