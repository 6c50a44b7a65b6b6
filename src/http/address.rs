//! Families of addresses that are not public, with their names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

/// A network with these first four groups. The other groups are zero.
const fn v6(a: u16, b: u16, c: u16, d: u16, prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0), prefix)
}

/// A single address.
const fn one(groups: [u16; 8]) -> Ipv6Net {
    let [a, b, c, d, e, f, g, h] = groups;
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), 128)
}

const METADATA: &str = "cloud metadata";

/// Link-local addresses, and other addresses of cloud metadata services.
const METADATA_V4: &[(Ipv4Net, &str)] = &[
    (v4(169, 254, 0, 0, 16), "link-local"),
    // Alibaba, Azure, Oracle.
    (v4(100, 100, 100, 200, 32), METADATA),
    (v4(168, 63, 129, 16, 32), METADATA),
    (v4(192, 0, 0, 192, 32), METADATA),
];

const METADATA_V6: &[(Ipv6Net, &str)] = &[
    (v6(0xfe80, 0, 0, 0, 10), "link-local"),
    // AWS (metadata, and credentials of pods), Google, Oracle, Scaleway, Linode, Alibaba.
    (v6(0xfd00, 0xec2, 0, 0, 32), METADATA),
    (one([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254]), METADATA),
    (one([0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe]), METADATA),
    (one([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42]), METADATA),
    (one([0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 1]), METADATA),
    (one([0xfd00, 0x100, 0, 0, 0, 0, 0x100, 0x200]), METADATA),
];

const V4_MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);
const V4_TRANSLATED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, 0, 0), 96);
const V4_COMPATIBLE: Ipv6Net = v6(0, 0, 0, 0, 96);
const NAT64: Ipv6Net = v6(0x64, 0xff9b, 0, 0, 96);
const NAT64_LOCAL: Ipv6Net = v6(0x64, 0xff9b, 1, 0, 48);
const TEREDO: Ipv6Net = v6(0x2001, 0, 0, 0, 32);
const SIX_TO_FOUR: Ipv6Net = v6(0x2002, 0, 0, 0, 16);

const LAST_FOUR: [usize; 4] = [12, 13, 14, 15];

/// IPv6 networks whose addresses embed an IPv4 address, with the positions of its four bytes. The last column is
/// an XOR mask: Teredo stores the address of its client inverted (RFC 4380).
const EMBEDDED: &[(Ipv6Net, &str, [usize; 4], u32)] = &[
    (V4_MAPPED, "v4-mapped", LAST_FOUR, 0),
    (V4_TRANSLATED, "v4-translated", LAST_FOUR, 0),
    (V4_COMPATIBLE, "v4-compatible", LAST_FOUR, 0),
    (SIX_TO_FOUR, "6to4", [2, 3, 4, 5], 0),
    (NAT64, "NAT64", LAST_FOUR, 0),
    // All positions of RFC 6052 (2.2): each network chooses its own.
    (NAT64_LOCAL, "NAT64", [6, 7, 9, 10], 0),
    (NAT64_LOCAL, "NAT64", [7, 9, 10, 11], 0),
    (NAT64_LOCAL, "NAT64", [9, 10, 11, 12], 0),
    (NAT64_LOCAL, "NAT64", LAST_FOUR, 0),
    (TEREDO, "Teredo", [4, 5, 6, 7], 0),
    (TEREDO, "Teredo", LAST_FOUR, u32::MAX),
];

/// IPv4 networks that are not public: the IANA IPv4 Special-Purpose Address Registry (RFC 6890 and its
/// updates), multicast (RFC 5771) and class E (RFC 1112).
const SPECIAL_V4: &[(Ipv4Net, &str)] = &[
    (v4(0, 0, 0, 0, 32), "unspecified"),
    (v4(0, 0, 0, 0, 8), "this network"),
    (v4(10, 0, 0, 0, 8), "private"),
    (v4(100, 64, 0, 0, 10), "carrier-grade NAT"),
    (v4(127, 0, 0, 0, 8), "loopback"),
    (v4(172, 16, 0, 0, 12), "private"),
    (v4(192, 0, 0, 0, 24), "reserved"),
    (v4(192, 0, 2, 0, 24), "documentation"),
    (v4(192, 88, 99, 0, 24), "6to4"),
    (v4(192, 168, 0, 0, 16), "private"),
    (v4(198, 18, 0, 0, 15), "benchmarking"),
    (v4(198, 51, 100, 0, 24), "documentation"),
    (v4(203, 0, 113, 0, 24), "documentation"),
    (v4(224, 0, 0, 0, 4), "multicast"),
    (v4(255, 255, 255, 255, 32), "broadcast"),
    (v4(240, 0, 0, 0, 4), "reserved"),
];

/// All addresses assigned as global unicast (RFC 4291, and IANA's registry of IPv6 address space).
const GLOBAL_UNICAST: Ipv6Net = v6(0x2000, 0, 0, 0, 3);

/// IPv6 networks that are not public: the IANA IPv6 Special-Purpose Address Registry. Networks outside of
/// [`GLOBAL_UNICAST`] are refused anyway, and are listed for their names.
const SPECIAL_V6: &[(Ipv6Net, &str)] = &[
    (one([0; 8]), "unspecified"),
    (one([0, 0, 0, 0, 0, 0, 0, 1]), "loopback"),
    (V4_MAPPED, "v4-mapped"),
    (V4_TRANSLATED, "v4-translated"),
    (V4_COMPATIBLE, "v4-compatible"),
    (NAT64, "NAT64"),
    (NAT64_LOCAL, "NAT64"),
    (v6(0x100, 0, 0, 0, 64), "discard"),
    (v6(0x100, 0, 0, 1, 64), "dummy"),
    (TEREDO, "Teredo"),
    (v6(0x2001, 2, 0, 0, 48), "benchmarking"),
    (v6(0x2001, 0x10, 0, 0, 28), "ORCHID"),
    (v6(0x2001, 0x20, 0, 0, 28), "ORCHID"),
    (v6(0x2001, 0, 0, 0, 23), "reserved"),
    (v6(0x2001, 0xdb8, 0, 0, 32), "documentation"),
    (SIX_TO_FOUR, "6to4"),
    (v6(0x3fff, 0, 0, 0, 20), "documentation"),
    (v6(0x5f00, 0, 0, 0, 16), "segment routing"),
    (v6(0xfc00, 0, 0, 0, 7), "unique local"),
    (v6(0xfec0, 0, 0, 0, 10), "site-local"),
    (v6(0xff00, 0, 0, 0, 8), "multicast"),
];

/// The family of a link-local or metadata address, or the form that embeds such an address.
pub(super) fn metadata(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => family_v4(METADATA_V4, address),
        IpAddr::V6(address) => family_v6(METADATA_V6, address).or_else(|| disguise(address)),
    }
}

fn disguise(address: Ipv6Addr) -> Option<&'static str> {
    let bytes = address.octets();
    let holds_metadata = |places: &[usize; 4], mask: u32| {
        let inner = u32::from_be_bytes(places.map(|place| bytes[place])) ^ mask;
        family_v4(METADATA_V4, inner.into()).is_some()
    };
    EMBEDDED
        .iter()
        .find(|(net, _, places, mask)| net.contains(&address) && holds_metadata(places, *mask))
        .map(|(_, form, ..)| *form)
}

/// The family of an address that is not public.
pub(super) fn special(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => family_v4(SPECIAL_V4, address),
        IpAddr::V6(address) => family_v6(SPECIAL_V6, address)
            .or_else(|| (!GLOBAL_UNICAST.contains(&address)).then_some("reserved")),
    }
}

/// The first row that contains the address. Smaller networks come before the networks that contain them.
fn family_v4(table: &[(Ipv4Net, &'static str)], address: Ipv4Addr) -> Option<&'static str> {
    let row = table.iter().find(|(net, _)| net.contains(&address));
    row.map(|(_, family)| *family)
}

fn family_v6(table: &[(Ipv6Net, &'static str)], address: Ipv6Addr) -> Option<&'static str> {
    let row = table.iter().find(|(net, _)| net.contains(&address));
    row.map(|(_, family)| *family)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn refused(text: &str) -> Option<&'static str> {
        metadata(ip(text)).or_else(|| special(ip(text)))
    }

    #[test]
    fn addresses_that_are_not_public_are_refused_and_named() {
        for (family, addresses) in [
            ("unspecified", "0.0.0.0 ::"),
            ("this network", "0.0.0.1 0.255.255.255"),
            ("loopback", "127.0.0.1 127.255.255.255 ::1"),
            (
                "link-local",
                "169.254.0.0 169.254.169.254 fe80::1 febf:ffff::1",
            ),
            (
                METADATA,
                "168.63.129.16 100.100.100.200 192.0.0.192 fd00:ec2::254 fd20:ce::254",
            ),
            (
                "private",
                "10.0.0.0 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1",
            ),
            ("carrier-grade NAT", "100.64.0.0 100.127.255.255"),
            ("multicast", "224.0.0.1 239.255.255.255 ff02::1 ff0e::1"),
            (
                "reserved",
                "192.0.0.1 240.0.0.0 255.255.255.254 2001:1::1 2001:4:112::1 4000::1 e000::1",
            ),
            ("broadcast", "255.255.255.255"),
            ("benchmarking", "198.18.0.1 198.19.255.255 2001:2::1"),
            (
                "documentation",
                "192.0.2.1 198.51.100.1 203.0.113.255 2001:db8::1 3fff:fff::1",
            ),
            ("unique local", "fc00::1 fdff::1"),
            ("site-local", "fec0::1"),
            (
                "v4-mapped",
                "::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 ::ffff:169.254.169.254",
            ),
            ("v4-translated", "::ffff:0:10.0.0.1"),
            ("v4-compatible", "::127.0.0.1 ::8.8.8.8 ::2"),
            ("6to4", "2002:7f00:1:: 2002:808:808::1 192.88.99.1"),
            ("NAT64", "64:ff9b::127.0.0.1 64:ff9b::8.8.8.8 64:ff9b:1::1"),
            ("Teredo", "2001::1 2001:0:ffff:ffff::1"),
            ("ORCHID", "2001:10::1 2001:1f::1 2001:20::1 2001:2f::1"),
            ("discard", "100::1"),
            ("segment routing", "5f00::1"),
        ] {
            for address in addresses.split(' ') {
                assert_eq!(refused(address), Some(family), "{address}");
            }
        }
        for address in
            "1.1.1.1 8.8.8.8 11.0.0.1 93.184.216.34 100.63.255.255 100.128.0.0 128.0.0.1 \
                        169.253.255.255 172.15.255.255 172.32.0.0 192.0.1.1 198.17.255.255 \
                        198.20.0.0 223.255.255.255 2001:200::1 2001:4860:4860::8888 \
                        2003::1 2606:4700::1111 2a00::1 3ffe::1"
                .split_whitespace()
        {
            assert_eq!(refused(address), None, "{address}");
        }
    }

    #[test]
    fn by_default_only_link_local_and_metadata_addresses_are_refused_in_every_form() {
        for address in "169.254.169.254 169.254.170.2 168.63.129.16 100.100.100.200 fe80::a9fe:a9fe \
                        fd00:ec2::254 fd00:ec2::23 fd20:ce::254 fd00:c1::a9fe:a9fe fd00:42::42 \
                        ::ffff:169.254.169.254 ::ffff:0:169.254.169.254 ::169.254.169.254 \
                        2002:a9fe:a9fe::1 64:ff9b::169.254.169.254 64:ff9b::a9fe:aa02 \
                        64:ff9b:1:a9fe:a9:fe00:: 64:ff9b:1:1a9:fe:a9fe:: 64:ff9b:1:1:a9:fea9:fe00:0 \
                        64:ff9b:1::a9fe:a9fe 2001:0:a9fe:a9fe:: 2001:0:102:304::5601:5601"
            .split_whitespace()
        {
            let refusal = metadata(ip(address));
            assert!(refusal.is_some(), "{address}");
            assert!(refused(address).is_some(), "{address}");
        }
        for address in "127.0.0.1 ::1 10.0.0.1 192.168.1.1 172.17.0.1 100.64.0.1 fd00::1 8.8.8.8 \
                        ::ffff:127.0.0.1 64:ff9b::8.8.8.8 2002:808:808::1 2001:0:102:304::fefd:fcfb"
            .split_whitespace()
        {
            assert_eq!(metadata(ip(address)), None, "{address}");
        }
    }
}
