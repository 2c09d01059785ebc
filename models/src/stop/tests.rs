use proptest::prelude::*;
use rstest::rstest;

use super::*;

/// The definition: try every end, and at each the longest stop string.
fn naive(text: &str, stops: &[String]) -> (String, Option<usize>) {
    for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
        let mut best: Option<usize> = None;
        for (index, stop) in stops.iter().enumerate() {
            let longer = best.is_none_or(|best| stops[best].len() < stop.len());
            if !stop.is_empty() && text[..end].ends_with(stop.as_str()) && longer {
                best = Some(index);
            }
        }
        if let Some(index) = best {
            return (text[..end - stops[index].len()].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #[test]
    fn agrees_with_the_definition(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{0,4}", 0..4),
    ) {
        let whole = pieces.concat();
        let (expected, matched) = naive(&whole, &stops);
        let mut matcher = StopMatcher::new(stops.clone());
        let (mut given, mut given_match, mut pushed) = (String::new(), None, String::new());
        for piece in &pieces {
            pushed.push_str(piece);
            let output = matcher.push(piece);
            given.push_str(&output.text);
            given_match = output.matched;
            if given_match.is_none() {
                // What is held back is the longest end of the text that begins a stop string, no more.
                let held = &pushed[given.len()..];
                let longest = (0..=pushed.len())
                    .filter(|start| pushed.is_char_boundary(*start))
                    .map(|start| &pushed[start..])
                    .find(|end| end.is_empty() || stops.iter().any(|stop| stop.starts_with(end)))
                    .unwrap();
                prop_assert_eq!(held, longest);
            }
        }
        given.push_str(&matcher.finish());
        prop_assert_eq!(given, expected);
        prop_assert_eq!(given_match, matched);
    }
}

#[rstest]
#[case(&["</s>"], &["a<", "/s", ">b"], "a", Some(0))]
#[case(&["ab", "xab"], &["xa", "b"], "", Some(1))]
#[case(&["abc", "b"], &["ab"], "a", Some(1))]
#[case(&["aab"], &["aaa", "aab"], "aaa", Some(0))]
#[case(&["é"], &["caf", "é"], "caf", Some(0))]
#[case(&[""], &["a"], "a", None)]
#[case(&[], &["a", "b"], "ab", None)]
#[case(&["stop"], &["st", "ay"], "stay", None)]
fn ends_the_text(
    #[case] stops: &[&str],
    #[case] pieces: &[&str],
    #[case] expected: &str,
    #[case] matched: Option<usize>,
) {
    let mut matcher = StopMatcher::new(stops.iter().copied());
    let outputs: Vec<StopOutput> = pieces.iter().map(|piece| matcher.push(piece)).collect();
    let text: String = outputs.iter().map(|output| output.text.as_str()).collect();
    assert_eq!(text + &matcher.finish(), expected);
    assert_eq!(outputs.last().unwrap().matched, matched);
}

#[test]
fn nothing_comes_after_a_match() {
    let mut matcher = StopMatcher::new(["x"]);
    assert_eq!(matcher.push("ax").matched, Some(0));
    assert_eq!(matcher.push("more"), StopOutput { text: String::new(), matched: Some(0) });
    assert_eq!(matcher.finish(), "");
}
