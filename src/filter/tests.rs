//! What filters mean, case by case. `oracle` compares random filters and payloads with a plain second version.

mod fuzz;
mod oracle;

use super::{
    BUDGET, Filter, FilterOutcome, MAX_FILTER_BYTES, MAX_FILTER_DEPTH, MAX_LEAVES,
    MAX_PAYLOAD_DEPTH, evaluate,
};

fn filter(pattern: &str) -> Filter {
    match pattern.parse() {
        Ok(filter) => filter,
        Err(error) => panic!("{pattern}: {error}"),
    }
}

fn outcome(pattern: &str, payload: &str) -> FilterOutcome {
    evaluate(&[&filter(pattern)], "order.paid", None, payload)[0]
}

fn matches(pattern: &str, payload: &str) -> bool {
    match outcome(pattern, payload) {
        FilterOutcome::Matches => true,
        FilterOutcome::DoesNot => false,
        FilterOutcome::TooMuch => panic!("too much: {pattern} {payload}"),
    }
}

/// Checks for each payload whether the pattern matches.
fn check(pattern: &str, payloads: &[(&str, bool)]) {
    for (payload, expected) in payloads {
        assert_eq!(matches(pattern, payload), *expected, "{pattern} {payload}");
    }
}

fn refusal(pattern: &str) -> String {
    match pattern.parse::<Filter>() {
        Ok(_) => panic!("{pattern} is accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn all_fields_must_match_and_one_alternative_of_each() {
    check(
        r#"{"euro": [{"numeric": [">=", 100]}], "country": ["DE", "AT"]}"#,
        &[
            (r#"{"euro": 100, "country": "AT", "more": {}}"#, true),
            (r#"{"euro": 99.99, "country": "AT"}"#, false),
            (r#"{"euro": 100, "country": "FR"}"#, false),
            (r#"{"euro": 100}"#, false),
            (r#"{"euro": "100", "country": "AT"}"#, false),
        ],
    );
    check(
        r#"{"customer": {"tier": ["gold"], "address": {"zip": [{"prefix": "10"}]}}}"#,
        &[
            (
                r#"{"customer": {"address": {"zip": "10115"}, "tier": "gold"}}"#,
                true,
            ),
            (
                r#"{"customer": {"address": {"zip": "20115"}, "tier": "gold"}}"#,
                false,
            ),
            (r#"{"tier": "gold", "address": {"zip": "10115"}}"#, false),
        ],
    );
}

#[test]
fn a_value_equals_a_value_of_the_same_kind_only() {
    let kinds = [
        r#""1""#,
        "1",
        "true",
        "false",
        "null",
        r#""true""#,
        r#""""#,
        "0",
    ];
    for pattern in kinds {
        for payload in kinds {
            let is_equal = matches(
                &format!(r#"{{"a": [{pattern}]}}"#),
                &format!(r#"{{"a": {payload}}}"#),
            );
            assert_eq!(is_equal, pattern == payload, "{pattern} {payload}");
        }
    }
}

#[test]
fn operators_on_text_compare_whole_characters() {
    check(
        r#"{"a": [{"prefix": "ab"}]}"#,
        &[
            (r#"{"a": "abc"}"#, true),
            (r#"{"a": "a"}"#, false),
            (r#"{"a": 1}"#, false),
        ],
    );
    check(
        r#"{"a": [{"suffix": ".de"}]}"#,
        &[(r#"{"a": "x.de"}"#, true), (r#"{"a": "x.de "}"#, false)],
    );
    check(
        r#"{"a": [{"equals-ignore-case": "ÄpfelK"}]}"#,
        &[
            (r#"{"a": "äPFELk"}"#, true),
            ("{\"a\": \"äpfel\u{212a}\"}", true),
            (r#"{"a": "äpfel"}"#, false),
            (r#"{"a": "\ud800"}"#, false),
        ],
    );
}

#[test]
fn anything_but_matches_other_texts_numbers_booleans_and_null() {
    check(
        r#"{"a": [{"anything-but": ["x", 1]}]}"#,
        &[
            (r#"{"a": "y"}"#, true),
            (r#"{"a": "1"}"#, true),
            (r#"{"a": null}"#, true),
            (r#"{"a": "x"}"#, false),
            (r#"{"a": 1.0}"#, false),
            (r#"{"a": {}}"#, false),
            (r#"{"a": []}"#, false),
            ("{}", false),
            (r#"{"a": ["x", "y"]}"#, true),
            (r#"{"a": ["x", [1]]}"#, false),
        ],
    );
    check(
        r#"{"a": [{"anything-but": {"prefix": "x"}}]}"#,
        &[
            (r#"{"a": "yx"}"#, true),
            (r#"{"a": 5}"#, true),
            (r#"{"a": "xy"}"#, false),
            ("{}", false),
        ],
    );
    check(
        r#"{"a": [{"anything-but": null}]}"#,
        &[(r#"{"a": 0}"#, true), (r#"{"a": null}"#, false)],
    );
}

#[test]
fn numbers_are_exact_decimals_of_any_length() {
    check(
        r#"{"a": [9007199254740993]}"#,
        &[
            (r#"{"a": 9007199254740993.000}"#, true),
            (r#"{"a": 900719925474099300e-2}"#, true),
            (r#"{"a": 0.9007199254740993E+16}"#, true),
            (r#"{"a": 9007199254740992}"#, false),
            (r#"{"a": 9007199254740993.00000000000000000001}"#, false),
        ],
    );
    check(
        r#"{"a": [{"numeric": [">", 18446744073709551615]}]}"#,
        &[
            (r#"{"a": 18446744073709551615.1}"#, true),
            (r#"{"a": 1e99999999999999999999}"#, true),
            (r#"{"a": 18446744073709551615.0}"#, false),
            (r#"{"a": -1e99999999999999999999}"#, false),
        ],
    );
    check(
        r#"{"a": [0]}"#,
        &[
            (r#"{"a": -0.0e7}"#, true),
            (r#"{"a": 0e99999999999999999999}"#, true),
            (r#"{"a": 1e-99999999999999999999}"#, false),
        ],
    );
    check(
        r#"{"a": [{"numeric": ["<=", 0.2, ">", -1.5e-3]}]}"#,
        &[
            (r#"{"a": 0.2}"#, true),
            (r#"{"a": -0.0014999999999999999999999999}"#, true),
            (r#"{"a": -0.0015}"#, false),
            (r#"{"a": 0.20000000000000000000000001}"#, false),
        ],
    );
    check(
        r#"{"a": [{"numeric": ["=", 5]}]}"#,
        &[(r#"{"a": 5.0}"#, true), (r#"{"a": "5"}"#, false)],
    );
}

#[test]
fn exists_asks_whether_the_field_is_there_whatever_it_has() {
    let there = [
        r#"{"a": 1}"#,
        r#"{"a": null}"#,
        r#"{"a": []}"#,
        r#"{"a": {}}"#,
        r#"{"a": [{"b": 1}]}"#,
    ];
    for payload in there {
        check(r#"{"a": [{"exists": true}]}"#, &[(payload, true)]);
        check(r#"{"a": [{"exists": false}]}"#, &[(payload, false)]);
    }
    for payload in ["{}", "[]", "[1]", "5", "null", r#""a""#] {
        check(r#"{"a": [{"exists": true}]}"#, &[(payload, false)]);
        check(r#"{"a": [{"exists": false}]}"#, &[(payload, true)]);
    }
    // One of the alternatives.
    check(
        r#"{"a": [{"exists": false}, null]}"#,
        &[
            ("{}", true),
            (r#"{"a": null}"#, true),
            (r#"{"a": 1}"#, false),
        ],
    );
}

#[test]
fn below_what_is_no_object_nothing_exists() {
    check(
        r#"{"a": {"b": [{"exists": false}]}}"#,
        &[
            ("{}", true),
            (r#"{"a": 1}"#, true),
            (r#"{"a": null}"#, true),
            (r#"{"a": {}}"#, true),
            (r#"{"a": []}"#, true),
            (r#"{"a": [1, [2]]}"#, true),
            (r#"{"a": {"b": null}}"#, false),
            // Where there are objects, only they count.
            (r#"{"a": [{"b": 1}, 2]}"#, false),
            (r#"{"a": [{"b": 1}, {}]}"#, true),
        ],
    );
    check(
        r#"{"a": {"b": [{"exists": true}]}}"#,
        &[
            (r#"{"a": [2, {"b": []}]}"#, true),
            (r#"{"a": [2, []]}"#, false),
        ],
    );
}

#[test]
fn fields_of_one_object_in_an_array_match_together() {
    check(
        r#"{"items": {"sku": ["A"], "count": [{"numeric": [">", 1]}]}}"#,
        &[
            (
                r#"{"items": [{"sku": "A", "count": 1}, {"sku": "B", "count": 5}]}"#,
                false,
            ),
            (
                r#"{"items": [{"sku": "B", "count": 1}, {"sku": "A", "count": 5}]}"#,
                true,
            ),
            (r#"{"items": [[], [[{"sku": "A", "count": 5}]]]}"#, true),
            (r#"{"items": {"sku": "A", "count": 5}}"#, true),
        ],
    );
    // Together at each level.
    check(
        r#"{"a": {"b": {"c": [1], "d": [2]}, "e": [3]}}"#,
        &[
            (
                r#"{"a": [{"b": [{"c": 1, "d": 2}], "e": 4}, {"b": [{"c": 1}, {"d": 2}], "e": 3}]}"#,
                false,
            ),
            (
                r#"{"a": [{"b": [{"c": 1, "d": 2}, {}], "e": [4, 3]}]}"#,
                true,
            ),
        ],
    );
    check(
        r#"{"a": [1]}"#,
        &[
            (r#"[{"a": 2}, {"a": [[3], [1]]}]"#, true),
            (r#"{"a": [{"a": 1}]}"#, false),
        ],
    );
}

#[test]
fn the_last_of_repeated_fields_counts() {
    check(
        r#"{"a": [1]}"#,
        &[
            (r#"{"a": 2, "a": 1}"#, true),
            (r#"{"a": 1, "\u0061": 2}"#, false),
        ],
    );
    check(
        r#"{"a": {"b": [1]}}"#,
        &[(r#"{"a": {"b": 1}, "a": {}}"#, false)],
    );
    let many: Vec<String> = (0..100)
        .map(|n| format!(r#""f{n}": 0, "a": {n}"#))
        .collect();
    let names: Vec<String> = (0..90).map(|n| format!(r#""f{n}": [0]"#)).collect();
    check(
        &format!(r#"{{"a": [99], {}}}"#, names.join(",")),
        &[(&format!("{{{}}}", many.join(",")), true)],
    );
}

#[test]
fn a_filter_reads_its_fields_although_other_fields_are_unreadable() {
    let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    for other in [
        r#""\u0000""#,
        r#""\ud800""#,
        r#""\udc00\ud800""#,
        "1e400",
        "-1e-400",
        &deep,
        r#"{"\ud800": {"\u0000": 1}}"#,
    ] {
        let payload = format!(r#"{{"x": {other}, "\udfff": {other}, "a": 1, "z": [{other}]}}"#);
        check(r#"{"a": [1]}"#, &[(&payload, true)]);
        check(
            r#"{"x": [{"exists": true}], "a": [1]}"#,
            &[(&payload, true)],
        );
    }
}

#[test]
fn a_null_character_is_a_character_and_half_of_a_pair_equals_none() {
    check(
        r#"{"a": ["x\u0000"]}"#,
        &[(r#"{"a": "x\u0000"}"#, true), (r#"{"a": "x"}"#, false)],
    );
    check(r#"{"a": ["\ufffd"]}"#, &[(r#"{"a": "\ud800"}"#, false)]);
    check(
        r#"{"a": [{"prefix": "x"}]}"#,
        &[(r#"{"a": "x\ud800"}"#, true)],
    );
    check(
        r#"{"a": [{"suffix": "\ud83d\ude00"}]}"#,
        &[
            (r#"{"a": "\ud83d\ud83d\ude00"}"#, true),
            (r#"{"a": "\ude00"}"#, false),
        ],
    );
    check(
        r#"{"a": [{"anything-but": ["x"]}]}"#,
        &[(r#"{"a": "\ud800"}"#, true)],
    );
    check(
        r#"{"a": [{"exists": true}]}"#,
        &[(r#"{"a": "\ud800"}"#, true)],
    );
}

#[test]
fn a_named_field_that_stands_too_deep_does_not_match() {
    for pattern in [
        r#"{"a": {"b": [1]}}"#,
        r#"{"a": {"b": [{"exists": true}]}}"#,
        r#"{"a": {"b": [{"exists": false}, 1]}}"#,
    ] {
        for (arrays, expected) in [
            (MAX_PAYLOAD_DEPTH - 2, true),
            (MAX_PAYLOAD_DEPTH - 1, false),
        ] {
            let payload = format!(
                r#"{{"a": {}{{"b": 1}}{}}}"#,
                "[".repeat(arrays),
                "]".repeat(arrays)
            );
            check(pattern, &[(&payload, expected)]);
        }
    }
    let deep = |depth| format!(r#"{{"a": {}1{}}}"#, "[".repeat(depth), "]".repeat(depth));
    check(
        r#"{"a": [1]}"#,
        &[
            (&deep(MAX_PAYLOAD_DEPTH - 1), true),
            (&deep(MAX_PAYLOAD_DEPTH), false),
        ],
    );
    check(r#"{"a": [{"exists": true}]}"#, &[(&deep(100_000), true)]);
}

#[test]
fn topic_and_headers_stand_at_the_top() {
    let headers = Some(r#"{"X-Shop": "berlin", "ce-subject": "a", "x-shop": "bonn"}"#);
    let of =
        |pattern, headers| evaluate(&[&filter(pattern)], "order.paid", headers, r#"{"a": 1}"#)[0];
    assert_eq!(
        of(r#"{"$topic": [{"prefix": "order."}], "a": [1]}"#, None),
        FilterOutcome::Matches
    );
    assert_eq!(
        of(r#"{"$topic": ["order.late"], "a": [1]}"#, None),
        FilterOutcome::DoesNot
    );
    assert_eq!(
        of(r#"{"$topic": [{"exists": true}]}"#, None),
        FilterOutcome::Matches
    );
    assert_eq!(
        of(
            r#"{"$header": {"X-SHOP": ["bonn"], "ce-subject": ["a"]}}"#,
            headers
        ),
        FilterOutcome::Matches
    );
    assert_eq!(
        of(r#"{"$header": {"x-shop": ["berlin"]}}"#, headers),
        FilterOutcome::DoesNot
    );
    assert_eq!(
        of(r#"{"$header": {"x-shop": ["bonn"]}}"#, None),
        FilterOutcome::DoesNot
    );
    assert_eq!(
        of(r#"{"$header": {"x-shop": [{"exists": false}]}}"#, None),
        FilterOutcome::Matches
    );
    // Anywhere else these are names of fields.
    check(
        r#"{"a": {"$topic": [1]}, "$type": ["x"]}"#,
        &[(r#"{"a": {"$topic": 1}, "$type": "x"}"#, true)],
    );
}

#[test]
fn a_filter_that_asks_fields_of_what_is_no_json_does_not_match() {
    for payload in [
        "",
        "{",
        r#"{"a": 1"#,
        r#"{"a": 1}}"#,
        r#"{"a": 1,}"#,
        r#"{"a" 1}"#,
        "[1 2]",
        "tru",
        r#"{"a": "\x"}"#,
        "\u{0}",
    ] {
        check(r#"{"a": [{"exists": false}, 1]}"#, &[(payload, false)]);
        check(r#"{"$topic": ["order.paid"]}"#, &[(payload, true)]);
    }
}

#[test]
fn all_filters_of_a_message_have_their_own_outcome() {
    let texts = "y\",\"".repeat(200_000);
    let payload = format!(r#"{{"a": 1, "b": ["{texts}z"]}}"#);
    let filters = [
        r#"{"a": [1]}"#,
        r#"{"b": ["z"]}"#,
        r#"{"a": [2]}"#,
        r#"{"b": ["y"]}"#,
    ]
    .map(filter);
    let outcomes = evaluate(&filters.each_ref(), "t", None, &payload);
    use FilterOutcome::{DoesNot, Matches, TooMuch};
    assert_eq!(outcomes, [Matches, TooMuch, DoesNot, Matches]);
    assert!(evaluate(&[], "t", None, &payload).is_empty());
}

#[test]
fn a_filter_has_its_part_of_the_budget_however_much_others_need() {
    let payload = format!(r#"{{"a": [{}], "b": {}}}"#, ones(9_000), list(&ones(50)));
    let (much, little) = (filter(r#"{"a": [2]}"#), filter(r#"{"b": [2, 3]}"#));
    // What the cheap ones leave suffices for all.
    let outcomes = asked(&[&much; 20], &[&little; 100], &payload);
    assert!(outcomes.iter().all(|one| *one == FilterOutcome::DoesNot));
    // It does not, and the cheap ones have their answer all the same.
    let outcomes = asked(&[&much; 200], &[&little; 800], &payload);
    let (much, little) = outcomes.split_at(200);
    assert!(much.iter().all(|one| *one == FilterOutcome::TooMuch));
    assert!(little.iter().all(|one| *one == FilterOutcome::DoesNot));
}

fn ones(count: usize) -> String {
    vec!["1"; count].join(",")
}

fn list(items: &str) -> String {
    format!("[{items}]")
}

fn asked(some: &[&Filter], others: &[&Filter], payload: &str) -> Vec<FilterOutcome> {
    evaluate(&[some, others].concat(), "t", None, payload)
}

/// Each value of `anything-but` is compared.
#[test]
fn a_filter_pays_for_each_value_that_it_excludes() {
    let values = (0..99).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    let payload = format!(r#"{{"a": [{}]}}"#, ones(1_000));
    let excludes = format!(r#"{{"a": [{{"anything-but": [{values}]}}]}}"#);
    assert_eq!(outcome(&excludes, &payload), FilterOutcome::TooMuch);
    let excludes = r#"{"a": [{"anything-but": [1, 2, 3]}]}"#;
    assert_eq!(outcome(excludes, &payload), FilterOutcome::DoesNot);
}

#[test]
fn a_decimal_of_a_pattern_is_exact_or_refused() {
    for (pattern, equal, other) in [
        (
            "0.123456789012345",
            "0.123456789012345",
            "0.1234567890123451",
        ),
        ("1e-23", "1e-23", "1.0000000000000001e-23"),
        ("-2.5e300", "-2.50e300", "-2.5000000000000001e300"),
        ("99.9999999999999", "99.9999999999999", "100"),
    ] {
        let pattern = format!(r#"{{"a": [{pattern}]}}"#);
        for (number, matches) in [(equal, true), (other, false)] {
            check(&pattern, &[(&format!(r#"{{"a": {number}}}"#), matches)]);
        }
    }
    for number in [
        "0.9999999999999999",
        "99.99999999999999",
        "123456789012345678901",
    ] {
        let pattern = format!(r#"{{"a": [{number}]}}"#).parse::<Filter>();
        let refused = pattern.map(drop).map_err(|error| error.place);
        assert_eq!(refused, Err("a[0]".to_owned()), "{number}");
    }
}

#[test]
fn a_filter_stops_when_its_budget_is_spent() {
    let within = BUDGET as usize / 3;
    let objects = |count: usize| format!(r#"{{"a": [{}]}}"#, vec![r#"{"b": 0}"#; count].join(","));
    // An element, a field and a comparison each, and the field `a`.
    check(r#"{"a": {"b": [1]}}"#, &[(&objects(within - 1), false)]);
    assert_eq!(
        outcome(r#"{"a": {"b": [1]}}"#, &objects(within + 1)),
        FilterOutcome::TooMuch
    );
    // Comparisons of long texts take more.
    let long = format!(r#""{}""#, "x".repeat(1600));
    let texts = |text: &str, count: usize| format!(r#"{{"a": [{}]}}"#, vec![text; count].join(","));
    let most = BUDGET as usize / 102;
    check(r#"{"a": ["y"]}"#, &[(&texts(&long, most - 1), false)]);
    assert_eq!(
        outcome(r#"{"a": ["y"]}"#, &texts(&long, most + 1)),
        FilterOutcome::TooMuch
    );
    let longest = format!(r#""{}""#, "x".repeat(1_000_000));
    check(r#"{"a": ["y", "z"]}"#, &[(&texts(&longest, 1), false)]);
    // Whether a field is there is known at once.
    check(
        r#"{"a": [{"exists": true}]}"#,
        &[(&texts("1", 200_000), true)],
    );
    check(
        r#"{"a": [{"exists": false}]}"#,
        &[(&texts("1", 200_000), false)],
    );
}

#[test]
fn a_refusal_names_the_place() {
    for (pattern, expected) in [
        ("", "not JSON: EOF while parsing a value at line 1 column 0"),
        ("[]", "expected an object that is not empty"),
        ("{}", "expected an object that is not empty"),
        (r#"{"a": {}}"#, "a: expected an object that is not empty"),
        (
            r#"{"a": 1}"#,
            r#"a: expected an array of alternatives, such as ["a", {"prefix": "b"}]"#,
        ),
        (
            r#"{"a": []}"#,
            r#"a: expected an array of alternatives, such as ["a", {"prefix": "b"}]"#,
        ),
        (
            r#"{"a": [[1]]}"#,
            "a[0]: expected a text, a number, true, false or null",
        ),
        (
            r#"{"a b": {"ä.": [{"prefix": 1}]}}"#,
            r#""a b"."ä."[0].prefix: expected a text"#,
        ),
        (
            r#"{"a": [1, {"prefix": "a", "suffix": "b"}]}"#,
            "a[1]: expected one operator",
        ),
        (
            r#"{"a": [{}]}"#,
            "a[0]: expected an object that is not empty",
        ),
        (
            r#"{"$or": [{"a": [1]}]}"#,
            "$or[0].a: unknown operator: expected prefix, suffix, equals-ignore-case, anything-but, numeric or exists",
        ),
        (
            r#"{"a": [{"exists": "true"}]}"#,
            "a[0].exists: expected true or false",
        ),
        (
            r#"{"a": [{"anything-but": []}]}"#,
            "a[0].anything-but: expected values",
        ),
        (
            r#"{"a": [{"anything-but": [1, {}]}]}"#,
            "a[0].anything-but[1]: expected a text, a number, true, false or null",
        ),
        (
            r#"{"a": [{"anything-but": {"suffix": "a"}}]}"#,
            "a[0].anything-but.suffix: expected values or a prefix",
        ),
        (
            r#"{"a": [{"numeric": [">=", 1, "<"]}]}"#,
            r#"a[0].numeric: expected one or two comparisons, such as [">=", 10, "<", 20]"#,
        ),
        (
            r#"{"a": [{"numeric": 1}]}"#,
            r#"a[0].numeric: expected one or two comparisons, such as [">=", 10, "<", 20]"#,
        ),
        (
            r#"{"a": [{"numeric": ["!=", 1]}]}"#,
            "a[0].numeric: expected =, <, <=, > or >= before a number",
        ),
        (
            r#"{"a": [{"numeric": [">", 1, "<", "2"]}]}"#,
            r#"a[0].numeric: expected one or two comparisons, such as [">=", 10, "<", 20]"#,
        ),
        (
            r#"{"a": [{"numeric": [">", 1, ">", 2]}]}"#,
            "a[0].numeric: expected a lower bound, and an upper bound above it",
        ),
        (
            r#"{"a": [{"numeric": [">=", 2, "<=", 2.0]}]}"#,
            "a[0].numeric: expected a lower bound, and an upper bound above it",
        ),
        (
            r#"{"a": [0.1234567890123456]}"#,
            "a[0]: write at most 15 digits, or a whole number of at most 64 bits",
        ),
        (
            r#"{"$topic": {"a": [1]}}"#,
            r#"$topic: expected an array of alternatives, such as ["a", {"prefix": "b"}]"#,
        ),
        (
            r#"{"$header": ["a"]}"#,
            "$header: expected an object that is not empty",
        ),
        (
            r#"{"$header": {"X-A": ["a"], "x-a": ["b"]}}"#,
            "$header.x-a: the header stands there twice",
        ),
    ] {
        assert_eq!(refusal(pattern), expected, "{pattern}");
    }
}

#[test]
fn a_filter_has_limits_of_size_depth_and_alternatives() {
    let nested =
        |depth: usize| format!("{}{}{}", r#"{"a":"#.repeat(depth), "[1]", "}".repeat(depth));
    filter(&nested(MAX_FILTER_DEPTH));
    assert!(refusal(&nested(MAX_FILTER_DEPTH + 1)).ends_with("a: fields nest at most 16 deep"));
    let values = |count: usize| vec!["1"; count].join(",");
    filter(&format!(
        r#"{{"a": [{}], "b": [{{"anything-but": [{}]}}]}}"#,
        values(MAX_LEAVES - 10),
        values(10)
    ));
    for pattern in [
        format!(r#"{{"a": [{}]}}"#, values(MAX_LEAVES + 1)),
        format!(
            r#"{{"a": [{}], "b": [{{"anything-but": [{}]}}]}}"#,
            values(MAX_LEAVES - 10),
            values(11)
        ),
    ] {
        assert!(
            refusal(&pattern).ends_with("a filter has at most 100 alternatives"),
            "{pattern}"
        );
    }
    let long = |bytes: usize| format!(r#"{{"a":["{}"]}}"#, "x".repeat(bytes - 10));
    filter(&long(MAX_FILTER_BYTES));
    assert_eq!(
        refusal(&long(MAX_FILTER_BYTES + 1)),
        "a filter has at most 4096 bytes"
    );
    let deep = format!(r#"{{"a": {}"#, "[".repeat(4000));
    assert!(refusal(&deep).starts_with("not JSON: "));
}

#[test]
fn a_filter_of_a_value_is_the_filter_of_its_text() {
    let text = r#"{"b": [{"numeric": [">", 0.1]}], "a": [1, null], "a": [2]}"#;
    let value: serde_json::Value = serde_json::from_str(text).expect("JSON");
    let of_value = Filter::new(&value).expect("a filter");
    assert_eq!(of_value, filter(&value.to_string()));
    assert!(Filter::new(&serde_json::json!([])).is_err());
}
