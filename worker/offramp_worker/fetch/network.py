"""Connections to addresses that a bundle may come from, and to no others.

Whoever may edit a service chooses the address that its pods connect to. Without a fence that reaches a cloud's metadata
service, the node and everything in the cluster. The name is resolved here, each address is judged, and the connection
goes to the very address that was judged: a name that changes its mind between two look-ups gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import certifi
import httpcore
import httpx

from offramp_core.errors import DeliveryError
from offramp_core.reasons import Reason

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
NEVER = (
    ipaddress.ip_network("169.254.0.0/16"),
    ipaddress.ip_network("fe80::/10"),
    ipaddress.ip_network("fd00:ec2::254/128"),  # the metadata service of EC2 has a private address as well
    ipaddress.ip_network("0.0.0.0/8"),
)


def refusal(text: str, *, allow_private: bool) -> str:
    """Why an address is not connected to; empty where it may be.

    Parameters
    ----------
    text : str
        An IPv4 or IPv6 address.
    allow_private : bool
        Whether private and loopback addresses are allowed. Link-local ones, where clouds keep credentials, never are.
    """
    address = _meant(ipaddress.ip_address(text.partition("%")[0]))
    if address.is_unspecified or any(address in network for network in NEVER if network.version == address.version):
        return "a link-local or reserved address, which is never connected to"
    if address.is_multicast:
        return "a multicast address, which is never connected to"
    if allow_private or address.is_global:
        return ""
    return "a private, loopback or cluster-internal address"


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it does: mapped, 6to4 and NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def resolve(host: str, port: int) -> list[str]:
    """Addresses of a name, in the system's order. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedNetwork(httpcore.NetworkBackend):
    """Opens connections to judged addresses. TLS still verifies the name, which the layer above passes on."""

    def __init__(self, *, allow_private: bool, resolver: Resolve = resolve) -> None:
        self._allow_private, self._resolver = allow_private, resolver
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """See :class:`httpcore.NetworkBackend`.

        Raises
        ------
        DeliveryError
            No address of the host may be connected to.
        """
        try:
            addresses = self._resolver(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} is not known to DNS ({error})") from error
        refused = {a: why for a in addresses if (why := refusal(a, allow_private=self._allow_private))}
        allowed = [a for a in addresses if a not in refused]
        if not allowed:
            address, why = next(iter(refused.items()))
            raise DeliveryError(
                Reason.ADDRESS_REFUSED,
                f"{host} is {address}, {why}",
                "keep the bundle at a public address, or ask the administrator to set the chart's "
                "delivery.allowPrivateNetworks",
            )
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in allowed:
            try:
                return self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class GuardedTransport(httpx.BaseTransport):
    """httpx over :class:`GuardedNetwork`. Knows no proxy: behind one nobody could say what is connected to."""

    def __init__(self, network: httpcore.NetworkBackend, *, ca_file: Path | None = None) -> None:
        context = ssl.create_default_context(cafile=certifi.where())
        context.load_default_certs()  # of the image, and those that SSL_CERT_FILE names
        if ca_file is not None:
            context.load_verify_locations(cafile=ca_file)
        self._pool = httpcore.ConnectionPool(ssl_context=context, max_connections=1, network_backend=network)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One exchange. Raises httpcore's errors."""
        url = httpcore.URL(
            scheme=request.url.raw_scheme, host=request.url.raw_host, port=request.url.port, target=request.url.raw_path
        )
        answer = self._pool.handle_request(
            httpcore.Request(request.method, url, headers=request.headers.raw, extensions=request.extensions)
        )
        assert isinstance(answer.stream, Iterable)
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer), extensions=answer.extensions)

    def close(self) -> None:
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        yield from self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()


def client(*, allow_private: bool, ca_file: Path | None = None, resolver: Resolve = resolve) -> httpx.Client:
    """A client that follows no redirect by itself and takes nothing from the environment."""
    network = GuardedNetwork(allow_private=allow_private, resolver=resolver)
    return httpx.Client(
        transport=GuardedTransport(network, ca_file=ca_file),
        timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
        follow_redirects=False,
        trust_env=False,
    )
