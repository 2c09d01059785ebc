//! Draws latency over throughput as SVG.

use super::report::{Percentiles, Point, Run};
use std::fmt::Write;

/// The size of a panel's frame in pixels.
const FRAME: (f64, f64) = (380.0, 260.0);
/// The margins of a frame, which hold its labels.
const LEFT: f64 = 70.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 60.0;
/// The distance from one panel to the next.
const PITCH: f64 = LEFT + FRAME.0 + 20.0;
/// The height of a line of the legend.
const LEGEND_LINE: f64 = 18.0;

/// Colours that are distinct under colour blindness (Okabe and Ito, 2008).
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// Selects a figure of a load.
type Figure = fn(&Point) -> &Percentiles;

/// The panels: the title and the figure, in milliseconds, of each.
const PANELS: [(&str, Figure); 3] = [
    ("time to first token, ms", |point| &point.first_token_seconds),
    ("time per token of an answer, ms", |point| &point.token_seconds),
    ("time between two tokens, ms", |point| &point.gap_seconds),
];

/// Draws the runs as one figure: p50 dashed and p95 solid, over requests per second, and tokens per second by load.
pub(super) fn svg(runs: &[Run]) -> String {
    let legend = LEGEND_LINE * runs.len() as f64;
    let (width, height) = (PITCH * (PANELS.len() + 1) as f64 + 10.0, TOP + FRAME.1 + BOTTOM + legend);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let title = runs.first().map_or_else(String::new, |run| {
        format!(
            "prompts of {} tokens, answers of {} (p95 solid, p50 dashed)",
            run.prompt_tokens, run.generated_tokens
        )
    });
    text(&mut svg, (LEFT, 24.0), "start", &title, " font-size=\"14\"");
    for (index, (name, figure)) in PANELS.iter().enumerate() {
        panel(&mut svg, LEFT + PITCH * index as f64, name, *figure, runs);
    }
    throughput(&mut svg, LEFT + PITCH * PANELS.len() as f64, runs);
    for (index, run) in runs.iter().enumerate() {
        let y = TOP + FRAME.1 + BOTTOM + LEGEND_LINE * index as f64;
        let colour = COLOURS[index % COLOURS.len()];
        add(
            &mut svg,
            format_args!(
                "<rect x=\"{LEFT}\" y=\"{}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>\n",
                y - 6.0
            ),
        );
        text(&mut svg, (LEFT + 20.0, y), "start", &run.label, "");
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, left: f64, name: &str, figure: Figure, runs: &[Run]) {
    let points = || runs.iter().flat_map(|run| &run.points);
    let x_axis = Axis::up_to(points().map(|point| point.requests_per_second));
    let y_axis = Axis::up_to(points().map(|point| figure(point).p95 * 1e3));
    let x = |value: f64| left + FRAME.0 * value / x_axis.end;
    let y = |value: f64| TOP + FRAME.1 * (1.0 - value / y_axis.end);
    text(svg, (left, TOP - 12.0), "start", name, " font-weight=\"bold\"");
    for tick in x_axis.ticks() {
        let at = x(tick);
        line(svg, (at, TOP), (at, TOP + FRAME.1));
        text(svg, (at, TOP + FRAME.1 + 18.0), "middle", &label(tick, x_axis.step), "");
    }
    for tick in y_axis.ticks() {
        let at = y(tick);
        line(svg, (left, at), (left + FRAME.0, at));
        text(svg, (left - 8.0, at + 4.0), "end", &label(tick, y_axis.step), "");
    }
    text(svg, (left + FRAME.0 / 2.0, TOP + FRAME.1 + 38.0), "middle", "requests/s", "");
    for (index, run) in runs.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let curve = |share: fn(&Percentiles) -> f64| -> Vec<(f64, f64)> {
            let places =
                run.points.iter().map(|point| (point.requests_per_second, share(figure(point)) * 1e3));
            places.filter(|place| place.1.is_finite()).map(|place| (x(place.0), y(place.1))).collect()
        };
        let p95 = curve(|figure| figure.p95);
        path(svg, &p95, colour, "");
        path(svg, &curve(|figure| figure.p50), colour, " stroke-dasharray=\"5 4\"");
        let marked = run.points.iter().filter(|point| figure(point).p95.is_finite());
        for ((x, y), point) in p95.into_iter().zip(marked) {
            mark(svg, (x, y), colour, point);
            text(svg, (x, y - 7.0), "middle", &point.load, " font-size=\"9\" fill=\"#555\"");
        }
    }
}

/// Draws tokens per second over the loads, by their names.
fn throughput(svg: &mut String, left: f64, runs: &[Run]) {
    let points = || runs.iter().flat_map(|run| &run.points);
    let mut loads: Vec<&str> = Vec::new();
    for point in points().filter(|point| point.answered > 0) {
        if !loads.contains(&point.load.as_str()) {
            loads.push(&point.load);
        }
    }
    let y_axis = Axis::up_to(points().map(|point| point.tokens_per_second));
    let y = |value: f64| TOP + FRAME.1 * (1.0 - value / y_axis.end);
    let x = |place: usize| left + FRAME.0 * (place as f64 + 0.5) / loads.len().max(1) as f64;
    text(svg, (left, TOP - 12.0), "start", "tokens/s", " font-weight=\"bold\"");
    for tick in y_axis.ticks() {
        let at = y(tick);
        line(svg, (left, at), (left + FRAME.0, at));
        text(svg, (left - 8.0, at + 4.0), "end", &label(tick, y_axis.step), "");
    }
    for (place, load) in loads.iter().enumerate() {
        // Neighbouring names do not overlap.
        let below = if place % 2 == 0 { 18.0 } else { 32.0 };
        line(svg, (x(place), TOP), (x(place), TOP + FRAME.1));
        text(svg, (x(place), TOP + FRAME.1 + below), "middle", load, " font-size=\"10\"");
    }
    for (index, run) in runs.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let place = |point: &Point| {
            let place = loads.iter().position(|load| *load == point.load)?;
            Some((x(place), y(point.tokens_per_second)))
        };
        let mut places: Vec<((f64, f64), &Point)> =
            run.points.iter().filter_map(|point| Some((place(point)?, point))).collect();
        places.sort_by(|a, b| a.0.0.total_cmp(&b.0.0));
        let curve: Vec<(f64, f64)> = places.iter().map(|(place, _)| *place).collect();
        path(svg, &curve, colour, "");
        places.into_iter().for_each(|(place, point)| mark(svg, place, colour, point));
    }
}

/// Marks a load, which shows its figures where a pointer rests on it.
fn mark(svg: &mut String, (x, y): (f64, f64), colour: &str, point: &Point) {
    let figures = format!(
        "{}: {:.2} requests/s, {:.1} tokens/s",
        point.load, point.requests_per_second, point.tokens_per_second
    );
    let figures = escaped(&figures);
    add(
        svg,
        format_args!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{figures}</title></circle>\n"
        ),
    );
}

/// A text without the characters that XML reads.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// An axis from 0 to `end` with a tick every `step`.
struct Axis {
    end: f64,
    step: f64,
}

impl Axis {
    /// An axis that reaches the largest of the values, with four to nine ticks at round values.
    fn up_to(values: impl Iterator<Item = f64>) -> Self {
        let largest = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        let largest = if largest > 0.0 { largest } else { 1.0 };
        let magnitude = 10f64.powf((largest / 8.0).log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * magnitude);
        let step = steps.into_iter().find(|step| largest / step <= 8.0).unwrap_or(steps[3]);
        Self { end: (largest / step).ceil() * step, step }
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let (count, step) = ((self.end / self.step).round() as usize, self.step);
        (0..=count).map(move |index| index as f64 * step)
    }
}

/// The label of a tick, with as many digits as the step needs.
fn label(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

fn path(svg: &mut String, places: &[(f64, f64)], colour: &str, style: &str) {
    let places: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let places = places.join(" ");
    add(
        svg,
        format_args!(
            "<polyline points=\"{places}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{style}/>\n"
        ),
    );
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    add(
        svg,
        format_args!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#ddd\"/>\n",
            from.0, from.1, to.0, to.1
        ),
    );
}

fn text(svg: &mut String, at: (f64, f64), anchor: &str, text: &str, style: &str) {
    let text = escaped(text);
    add(
        svg,
        format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\"{style}>{text}</text>\n",
            at.0, at.1
        ),
    );
}

fn add(svg: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = svg.write_fmt(text);
}

#[cfg(test)]
mod tests {
    use super::{super::report::Sla, *};
    use rstest::rstest;

    #[rstest]
    #[case(7.3, 8.0, 1.0)]
    #[case(8.1, 10.0, 2.0)]
    #[case(0.42, 0.5, 0.1)]
    #[case(3100.0, 3500.0, 500.0)]
    #[case(0.0, 1.0, 0.2)]
    fn axes_end_at_round_values(#[case] largest: f64, #[case] end: f64, #[case] step: f64) {
        let axis = Axis::up_to([f64::NAN, largest].into_iter());
        assert!(
            (axis.end - end).abs() < 1e-9 && (axis.step - step).abs() < 1e-9,
            "{} {}",
            axis.end,
            axis.step
        );
    }

    #[test]
    fn a_plot_is_xml_that_names_every_run_and_marks_every_point() {
        let figures = |p95| Percentiles { p50: p95 / 2.0, p95, p99: p95 };
        let point = |rate: f64| Point {
            load: format!("{rate} clients"),
            answered: 1,
            failed: 0,
            seconds: 1.0,
            requests_per_second: rate,
            prompt_tokens_per_second: 0.0,
            tokens_per_second: 100.0 * rate,
            first_token_seconds: figures(rate / 10.0),
            token_seconds: figures(rate / 100.0),
            gap_seconds: figures(rate / 50.0),
            answer_seconds: figures(1.0),
            effective_requests_per_second: 0.0,
            errors: Vec::new(),
        };
        let run = |label: &str| Run {
            label: label.into(),
            model: "m".into(),
            prompt_tokens: "512".into(),
            generated_tokens: "128".into(),
            requests: Some(1),
            load_seconds: None,
            sla: Sla { prompt_tokens_per_second: 512.0, tokens_per_second: 4.0 },
            points: vec![point(1.0), point(2.0)],
        };
        let svg = svg(&[run("a < b"), run("c")]);
        let document = roxmltree::Document::parse(&svg).expect("it is XML");
        let count = |tag: &str| document.descendants().filter(|node| node.has_tag_name(tag)).count();
        assert_eq!(count("circle"), 2 * 2 * 4, "points x runs x panels");
        assert_eq!(
            count("polyline"),
            2 * 2 * 3 + 2,
            "p50 and p95 x runs x panels, and tokens/s of both runs"
        );
        let named = |name: &str| document.descendants().filter(|node| node.text() == Some(name)).count();
        assert_eq!(
            named("2 clients"),
            2 * (2 * 3 + 1),
            "elements and their text nodes: runs x panels, and the axis"
        );
        assert!(named("2 clients: 2.00 requests/s, 200.0 tokens/s") > 0);
        assert!(document.descendants().any(|node| node.text() == Some("a < b")));
    }
}
