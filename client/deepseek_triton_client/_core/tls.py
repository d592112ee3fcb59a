"""The TLS context for HTTPS, which also checks the certificate files for gRPC."""

from __future__ import annotations

import os
import ssl

import certifi

from deepseek_triton_client._core.client_settings import Tls
from deepseek_triton_client._core.exceptions import InvalidRequest


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a TLS context. Raises InvalidRequest, naming the file that can't be used."""
    context = _trusting(tls)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.certificate is not None:
        try:
            # With an empty password, because OpenSSL would otherwise ask for one at the terminal.
            context.load_cert_chain(tls.certificate, tls.key, password="")
        except (OSError, ValueError) as exc:
            files = f"{str(tls.certificate)!r}" + (f" and tls.key {str(tls.key)!r}" if tls.key is not None else "")
            raise InvalidRequest(
                f"tls.certificate: expected a certificate in PEM with its key, not encrypted, got {files}: {exc}"
            ) from exc
    context.set_alpn_protocols(["http/1.1"])
    return context


def _trusting(tls: Tls) -> ssl.SSLContext:
    if tls.ca is not None:
        try:
            return ssl.create_default_context(cafile=tls.ca)
        except OSError as exc:
            raise InvalidRequest(f"tls.ca: expected certificates in PEM, got {str(tls.ca)!r}: {exc}") from exc
    context = ssl.create_default_context()
    if not _system_has_authorities():
        context.load_verify_locations(certifi.where())
    return context


def _system_has_authorities() -> bool:
    paths = ssl.get_default_verify_paths()
    return paths.cafile is not None or (paths.capath is not None and bool(os.listdir(paths.capath)))
