"""Source NAT or a firewall in a network namespace, set up over netlink, as not every machine has the program nft.

Run as `nsenter --net … python -S masquerade.py OUTSIDE` in the namespace of the router; needs no package. It has the
effect of `nft add rule ip nat postrouting oifname OUTSIDE masquerade`. Linux keeps the inner port if it is free, so a
machine has one outer port for all destinations. Further words on the command line:

    random  another outer port for each destination, as some companies' and providers' routers give
    silent  the router does not answer packets to itself, as RFC 5382 demands of routers
    closed  no NAT: a firewall on this machine itself, which lets in only answers to what it sent
"""

from __future__ import annotations

import os
import socket
import struct
import sys

NETLINK_NETFILTER = 12
NFNL_SUBSYS_NFTABLES = 10
NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END = 0x10, 0x11
NFT_MSG_NEWTABLE, NFT_MSG_NEWCHAIN, NFT_MSG_NEWRULE = 0, 3, 6
NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE, NLM_F_APPEND = 1, 4, 0x400, 0x800
NLMSG_ERROR = 2
NESTED = 0x8000
NF_INET_LOCAL_IN, NF_INET_POST_ROUTING = 1, 4
NF_ACCEPT, NFT_REG_VERDICT = 1, 0
NF_IP_PRI_FILTER, NF_IP_PRI_NAT_SRC = 0, 100
NF_DROP = 0
NF_NAT_RANGE_PROTO_RANDOM_FULLY = 16
NFT_REG_1 = 1
NFT_META_IIFNAME, NFT_META_OIFNAME = 6, 7
NFT_CT_STATE, ESTABLISHED_OR_RELATED = 0, 6
NFT_CMP_EQ, NFT_CMP_NEQ = 0, 1
INTERFACE_NAME_BYTES = 16
TABLE = "p2ptrain"


def attribute(kind: int, value: bytes) -> bytes:
    header = struct.pack("=HH", 4 + len(value), kind)
    return header + value + b"\0" * (-len(value) % 4)


def nested(kind: int, *values: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(values))


def number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def expression(name: str, *attributes: bytes) -> bytes:
    """An element of NFTA_RULE_EXPRESSIONS: NFTA_EXPR_NAME and NFTA_EXPR_DATA."""
    return nested(1, text(1, name), nested(2, *attributes))


def message(kind: int, flags: int, family: int, resource: int, *attributes: bytes) -> bytes:
    body = struct.pack(">BBH", family, 0, resource) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST | flags, 1, 0) + body


def masquerade(outside: str, *, random: bool = False, silent: bool = False) -> None:
    """Replace the source address of packets that leave by the interface `outside` by its address. Raises OSError."""
    hook = nested(4, number(1, NF_INET_POST_ROUTING), number(2, NF_IP_PRI_NAT_SRC))
    how = [number(1, NF_NAT_RANGE_PROTO_RANDOM_FULLY)] if random else []
    set_up(
        made(NFT_MSG_NEWCHAIN, text(1, TABLE), text(3, "postrouting"), hook, text(7, "nat")),
        rule("postrouting", *interface(NFT_META_OIFNAME, outside), expression("masq", *how)),
        *([nothing_in()] if silent else []),
    )


def close() -> None:
    """Let in only packets of this machine itself, and answers to those that it sent. Raises OSError."""
    is_answer = [
        expression("ct", number(1, NFT_REG_1), number(2, NFT_CT_STATE)),
        expression(
            "bitwise", number(1, NFT_REG_1), number(2, NFT_REG_1), number(3, 4),
            nested(4, attribute(1, struct.pack("=I", ESTABLISHED_OR_RELATED))), nested(5, attribute(1, bytes(4))),
        ),
        expression("cmp", number(1, NFT_REG_1), number(2, NFT_CMP_NEQ), nested(3, attribute(1, bytes(4)))),
    ]  # fmt: skip
    accept = expression("immediate", number(1, NFT_REG_VERDICT), nested(2, nested(2, number(1, NF_ACCEPT))))
    set_up(
        nothing_in(),
        rule("input", *interface(NFT_META_IIFNAME, "lo"), accept),
        rule("input", *is_answer, accept),
    )


def interface(key: int, name: str) -> list[bytes]:
    """Matches packets of an interface."""
    padded = name.encode().ljust(INTERFACE_NAME_BYTES, b"\0")
    return [
        expression("meta", number(2, key), number(1, NFT_REG_1)),
        expression("cmp", number(1, NFT_REG_1), number(2, NFT_CMP_EQ), nested(3, attribute(1, padded))),
    ]


def made(kind: int, *attributes: bytes) -> bytes:
    """The message that creates a table, a chain or a rule."""
    create = NLM_F_CREATE | NLM_F_ACK | (NLM_F_APPEND if kind == NFT_MSG_NEWRULE else 0)
    return message(NFNL_SUBSYS_NFTABLES << 8 | kind, create, socket.AF_INET, 0, *attributes)


def rule(chain: str, *expressions: bytes) -> bytes:
    return made(NFT_MSG_NEWRULE, text(1, TABLE), text(2, chain), nested(4, *expressions))


def nothing_in() -> bytes:
    """The message that creates a chain which drops what is addressed to this machine, where its rules do not accept."""
    to_itself = nested(4, number(1, NF_INET_LOCAL_IN), number(2, NF_IP_PRI_FILTER))
    return made(NFT_MSG_NEWCHAIN, text(1, TABLE), text(3, "input"), to_itself, number(5, NF_DROP), text(7, "filter"))


def set_up(*messages: bytes) -> None:
    """Create a table with these chains and rules, all at once. Raises OSError."""
    batch = [
        message(NFNL_MSG_BATCH_BEGIN, 0, 0, NFNL_SUBSYS_NFTABLES),
        made(NFT_MSG_NEWTABLE, text(1, TABLE)),
        *messages,
        message(NFNL_MSG_BATCH_END, 0, 0, NFNL_SUBSYS_NFTABLES),
    ]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.bind((0, 0))
        netlink.settimeout(5)
        netlink.send(b"".join(batch))
        answers = 0
        while answers < len(batch) - 2:  # not for its first and last message
            data = netlink.recv(65536)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                (error,) = struct.unpack_from("=i", data, 16)
                if kind == NLMSG_ERROR and error:
                    raise OSError(-error, f"nftables: {os.strerror(-error)}")
                answers += 1
                data = data[(size + 3) & ~3 :]


if __name__ == "__main__":
    if "closed" in sys.argv[2:]:
        close()
    else:
        masquerade(sys.argv[1], random="random" in sys.argv[2:], silent="silent" in sys.argv[2:])
