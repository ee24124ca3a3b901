//! Finds the known name that a misspelt one probably meant.

use alloc::vec::Vec;

/// The candidate nearest to `word`, if one is near enough to be worth showing.
///
/// Near enough means: one edit per three letters. An edit is a letter inserted,
/// removed, replaced or swapped with its neighbour. The first of equally near candidates wins.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() < SHORTEST_WORD_BYTES || word.len() > LONGEST_WORD_BYTES {
        return None;
    }
    let allowed = word.len() / 3;
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let edits = edits(word.as_bytes(), candidate.as_bytes());
        if edits <= allowed && best.is_none_or(|(least, _)| edits < least) {
            best = Some((edits, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Edit distance with neighbour swaps, in one pass over three rows.
fn edits(left: &[u8], right: &[u8]) -> usize {
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.iter().enumerate() {
        let mut row = Vec::with_capacity(right.len() + 1);
        row.push(i + 1);
        for (j, b) in right.iter().enumerate() {
            let replaced = last[j] + usize::from(!a.eq_ignore_ascii_case(b));
            let mut least = replaced.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *a == right[j - 1] && left[i - 1] == *b {
                least = least.min(before_last[j - 1] + 1);
            }
            row.push(least);
        }
        before_last = core::mem::replace(&mut last, row);
    }
    last[right.len()]
}

/// In shorter words one edit changes too much to say anything.
const SHORTEST_WORD_BYTES: usize = 3;
/// Longer words are not compared: no known name comes near that length.
const LONGEST_WORD_BYTES: usize = 64;
