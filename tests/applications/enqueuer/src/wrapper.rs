//! A wrapper around another connection, like wrappers that trace or count.

use diesel::connection::{
    AnsiTransactionManager, CacheSize, Connection, ConnectionSealed, DefaultLoadingMode,
    Instrumentation, LoadConnection, SimpleConnection, TransactionManager,
};
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::query_builder::{Query, QueryFragment, QueryId};
use diesel::{ConnectionResult, PgConnection, QueryResult};

pub struct Wrapper {
    pub inner: PgConnection,
    /// Statements that succeeded.
    pub statements: u32,
}

impl SimpleConnection for Wrapper {
    fn batch_execute(&mut self, query: &str) -> QueryResult<()> {
        self.inner.batch_execute(query)
    }
}

impl ConnectionSealed for Wrapper {}

impl Connection for Wrapper {
    type Backend = Pg;
    type TransactionManager = AnsiTransactionManager;

    fn establish(url: &str) -> ConnectionResult<Self> {
        let inner = PgConnection::establish(url)?;
        Ok(Self {
            inner,
            statements: 0,
        })
    }

    fn execute_returning_count<T: QueryFragment<Pg> + QueryId>(
        &mut self,
        source: &T,
    ) -> QueryResult<usize> {
        self.statements += 1;
        self.inner.execute_returning_count(source)
    }

    fn transaction_state(
        &mut self,
    ) -> &mut <AnsiTransactionManager as TransactionManager<Self>>::TransactionStateData {
        self.inner.transaction_state()
    }

    fn instrumentation(&mut self) -> &mut dyn Instrumentation {
        self.inner.instrumentation()
    }

    fn set_instrumentation(&mut self, instrumentation: impl Instrumentation) {
        self.inner.set_instrumentation(instrumentation);
    }

    fn set_prepared_statement_cache_size(&mut self, size: CacheSize) {
        self.inner.set_prepared_statement_cache_size(size);
    }
}

impl LoadConnection<DefaultLoadingMode> for Wrapper {
    type Cursor<'conn, 'query> =
        <PgConnection as LoadConnection<DefaultLoadingMode>>::Cursor<'conn, 'query>;
    type Row<'conn, 'query> =
        <PgConnection as LoadConnection<DefaultLoadingMode>>::Row<'conn, 'query>;

    fn load<'conn, 'query, T>(
        &'conn mut self,
        source: T,
    ) -> QueryResult<Self::Cursor<'conn, 'query>>
    where
        T: Query + QueryFragment<Pg> + QueryId + 'query,
        Pg: QueryMetadata<T::SqlType>,
    {
        self.statements += 1;
        LoadConnection::<DefaultLoadingMode>::load(&mut self.inner, source)
    }
}
