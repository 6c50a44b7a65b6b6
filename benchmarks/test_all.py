"""The check of the documents finds what it must find."""

import copy
import importlib
import json
import pathlib
import tempfile
import unittest
from unittest import mock

import drawn

bench_all = importlib.import_module("all")
NUMBERS = json.loads(bench_all.NUMBERS.read_text())


class Check(unittest.TestCase):
    def test_accepts_documents_as_drawn(self):
        self.assertEqual(bench_all.check(NUMBERS), [])

    def test_finds_each_document_that_was_edited(self):
        for name, number in [("PAGE", "commits/s |"), ("README", "µs of CPU"), ("CHART", "</svg>")]:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                file = getattr(bench_all, name)
                copied = pathlib.Path(folder) / file.name
                copied.write_text(file.read_text().replace(number, "1" + number))
                blocks = {copied if at == file else at: blocks for at, blocks in bench_all.BLOCKS.items()}
                with mock.patch.multiple(bench_all, **{name: copied, "BLOCKS": blocks}):
                    wrong = bench_all.check(NUMBERS)
                self.assertEqual([one for one in wrong if copied.name not in one], [])
                self.assertTrue(wrong)

    def test_finds_numbers_that_the_documents_do_not_show(self):
        for name, key in [("drain", "messages_per_second"), ("latency", "p99_ms"), ("registered", "threads")]:
            with self.subTest(name):
                numbers = copy.deepcopy(NUMBERS)
                for report in numbers["scenarios"][name]["reports"]:
                    report[key] += 100
                self.assertTrue(bench_all.check(numbers))

    def test_finds_a_scenario_that_was_measured_by_another_command(self):
        numbers = copy.deepcopy(NUMBERS)
        numbers["scenarios"]["relays"]["command"] += " --rounds 9"
        self.assertIn("relays was measured by another command", "\n".join(bench_all.check(numbers)))

    def test_names_scenarios_that_were_not_measured(self):
        numbers = copy.deepcopy(NUMBERS)
        del numbers["scenarios"]["aged"]
        with self.assertRaisesRegex(SystemExit, "--only aged"):
            bench_all.check(numbers)

    def test_finds_measured_numbers_in_prose_only(self):
        self.assertEqual(bench_all.measured("It delivers 50,000 messages/s at 17 µs."), ["50,000 messages/s", "17 µs"])
        self.assertEqual(bench_all.measured("At least 5 messages, `29 messages/s`."), [])
        markers = "<!-- make bench-all: x -->\n<!-- end of make bench-all -->"
        generated = drawn.put(markers, "make bench-all: x", "17 µs")
        self.assertEqual(bench_all.measured(generated), [])

    def test_needs_the_markers(self):
        with self.assertRaises(SystemExit):
            drawn.put("<!-- make bench-all: x -->\n", "make bench-all: x", "")


class Kept(unittest.TestCase):
    def test_all_scenarios_of_the_same_machine(self):
        scenarios, why = bench_all.kept(NUMBERS, NUMBERS["machine"], NUMBERS["small"])
        self.assertIsNone(why)
        self.assertEqual(scenarios, NUMBERS["scenarios"])

    def test_nothing_of_another_machine_or_size(self):
        for machine, is_small in [
            (NUMBERS["machine"] | {"cores": 99}, NUMBERS["small"]),
            (NUMBERS["machine"] | {"postgresql": "12.0"}, NUMBERS["small"]),
            (NUMBERS["machine"] | {"version": "0.0.0"}, NUMBERS["small"]),
            (NUMBERS["machine"], not NUMBERS["small"]),
        ]:
            scenarios, why = bench_all.kept(NUMBERS, machine, is_small)
            self.assertEqual(scenarios, {})
            self.assertIn("dropped", why)


if __name__ == "__main__":
    unittest.main()
