//! The program `diesel-outbox`: a standalone relay, and the commands for operators.

fn main() -> std::process::ExitCode {
    diesel_outbox_cli::main()
}
