//! A small curve of the last hour, or of a shorter span right after a start.

use std::time::Duration;

use maud::{Markup, html};

use super::words;

const WIDTH: f64 = 240.0;
const HEIGHT: f64 = 40.0;
/// Room for the width of the line.
const MARGIN: f64 = 2.0;

/// A curve of evenly spaced values, oldest first; `None` is a gap without data.
/// `name` is unique on the page and prefixes the element ids; `unit` formats a value.
pub(super) fn sparkline(
    name: &str,
    title: &str,
    span: Duration,
    values: &[Option<f64>],
    unit: impl Fn(f64) -> String,
) -> Markup {
    let known = || values.iter().flatten().copied();
    let highest = known().fold(0.0, f64::max);
    let description = if known().next().is_none() {
        "no data yet".to_owned()
    } else {
        format!(
            "lowest {}, highest {}, latest {}",
            unit(known().fold(f64::INFINITY, f64::min)),
            unit(highest),
            unit(known().last().unwrap_or(0.0)),
        )
    };
    let time = match span.as_secs() / 60 {
        60.. => "last hour".to_owned(),
        minutes => format!("last {minutes} min"),
    };
    html! {
        (curve(name, &format!("{title}, {time}"), &description, values))
        p.range {
            @if known().next().is_none() { "no data yet" }
            @else { (time) ", up to " (unit(highest)) }
        }
    }
}

/// The curve alone, with a title and a description for those who do not see it.
pub(crate) fn curve(name: &str, title: &str, description: &str, values: &[Option<f64>]) -> Markup {
    let highest = values.iter().flatten().copied().fold(0.0, f64::max);
    let (line, area) = paths(values, highest);
    html! {
        svg.sparkline viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } preserveAspectRatio="none" role="img"
            aria-labelledby={ (name) "-title " (name) "-desc" } {
            title id={ (name) "-title" } { (title) }
            desc id={ (name) "-desc" } { (description) }
            line.base x1="0" x2=(WIDTH) y1=(HEIGHT - 0.5) y2=(HEIGHT - 0.5) {}
            path.area d=(area) {}
            path.line d=(line) {}
        }
    }
}

/// `12/min`, from a rate per second.
pub(super) fn a_minute(per_second: f64) -> String {
    format!("{}/min", words::per_minute(per_second))
}

/// The paths of the line and of the area below it, with gaps where there is no data.
fn paths(values: &[Option<f64>], highest: f64) -> (String, String) {
    let (mut line, mut area) = (String::new(), String::new());
    let step = WIDTH / (values.len().max(2) - 1) as f64;
    let mut began = None;
    for (index, value) in values.iter().enumerate() {
        let x = index as f64 * step;
        let Some(value) = value else {
            close(&mut area, began.take(), x - step);
            continue;
        };
        let part = if highest > 0.0 { value / highest } else { 0.0 };
        let y = HEIGHT - MARGIN - part * (HEIGHT - 2.0 * MARGIN);
        if began.is_none() {
            began = Some(x);
            // Give the line a length, so that a single value is visible.
            line.push_str(&format!("M{:.1} {y:.1}", (x - step / 2.0).max(0.0)));
            area.push_str(&format!("M{x:.1} {HEIGHT}"));
        }
        line.push_str(&format!("L{x:.1} {y:.1}"));
        area.push_str(&format!("L{x:.1} {y:.1}"));
    }
    close(&mut area, began, WIDTH);
    (line, area)
}

fn close(area: &mut String, began: Option<f64>, x: f64) {
    if began.is_some() {
        area.push_str(&format!("L{x:.1} {HEIGHT}Z"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(values: &[Option<f64>]) -> String {
        sparkline("in", "Came in", Duration::from_secs(3600), values, a_minute).into_string()
    }

    #[test]
    fn a_curve_says_in_words_what_it_shows() {
        let svg = drawn(&[Some(0.0), Some(2.0), None, Some(1.0)]);
        assert!(svg.contains("lowest 0/min, highest 120/min, latest 60/min"));
        assert!(svg.contains(r#"aria-labelledby="in-title in-desc""#));
        assert!(!svg.contains("style="), "{svg}");
        assert!(drawn(&[None, None]).contains("no data yet"));
    }

    #[test]
    fn it_stays_in_its_box_and_is_interrupted_where_nothing_is_known() {
        for values in [
            vec![],
            vec![Some(5.0)],
            vec![None, Some(0.0)],
            vec![Some(1e9), None, Some(0.5), Some(3.0), None],
        ] {
            let (line, area) = paths(
                &values,
                values.iter().flatten().copied().fold(0.0, f64::max),
            );
            let numbers = line
                .split(['M', 'L', ' '])
                .chain(area.split(['M', 'L', 'Z', ' ']));
            for number in numbers.filter(|part| !part.is_empty()) {
                let number: f64 = number.parse().expect("a number");
                assert!((0.0..=WIDTH).contains(&number), "{number} of {values:?}");
            }
        }
        let (line, area) = paths(&[Some(1.0), None, Some(1.0)], 1.0);
        assert_eq!(line.matches('M').count(), 2);
        assert_eq!(area.matches('Z').count(), 2);
    }
}
