"""An authority of our own, and its certificate for 127.0.0.1."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Certificates:
    """Files in PEM."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    own, leaf = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    local = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    authority = _signed("authority", own, "authority", own, x509.BasicConstraints(True, None))
    certificate = _signed("leaf", leaf, "authority", own, local)
    made = Certificates(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    pem = serialization.Encoding.PEM
    made.authority.write_bytes(authority.public_bytes(pem))
    made.certificate.write_bytes(certificate.public_bytes(pem))
    plain = serialization.NoEncryption()
    made.key.write_bytes(leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return made


def _signed(
    name: str, key: Key, issuer: str, issuers: Key, extension: x509.ExtensionType
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        subject_name=_named(name),
        issuer_name=_named(issuer),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(hours=1),
        not_valid_after=now + datetime.timedelta(hours=1),
    )
    return builder.add_extension(extension, critical=False).sign(issuers, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
